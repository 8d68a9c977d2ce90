"""What a value looks like without its numbers: told once, and then only numbers are sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.checkpoint.tree import DTYPES, NAMES
from allranks.torch.data.collate import tensors_in

TENSOR = "tensor"
PLAIN = (bool, int, float, str, type(None))
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MOST_DIMS = 5  # 120 orders: the number of one fits in a byte


@dataclass(frozen=True)
class TensorMeta:
    """What there is to know of a value but its numbers; `text` is how it is told."""

    text: str

    @staticmethod
    def of(value: Any) -> TensorMeta:
        if type(value) is Tensor:
            return _of_one(value.dtype, value.shape, laid_out(value).stride(), value.requires_grad)
        rows = [
            _row(t.dtype, t.shape, laid_out(t).stride(), t.requires_grad) for t in tensors_in(value)
        ]
        return TensorMeta(json.dumps([_structure(value), rows]))

    def tensors(self, device: torch.device) -> list[tuple[Tensor, bool]]:
        """Room for each tensor, and whether it wants a gradient."""
        return [
            (torch.empty_strided(shape, stride, dtype=DTYPES[kind], device=device), wants)
            for kind, shape, stride, wants in self.rows
        ]

    def value(self, tensors: Iterator[Tensor]) -> Any:
        """The value that is made of these tensors."""
        return _value(_parsed(self.text)[0], tensors)

    @property
    def shapes(self) -> list[tuple[torch.dtype, list[int], list[int]]]:
        """Type, shape and strides of each tensor."""
        return [(DTYPES[kind], shape, stride) for kind, shape, stride, _ in self.rows]

    @property
    def rows(self) -> list[Any]:
        """Of each tensor the type, shape, strides, and whether it wants a gradient."""
        found: list[Any] = _parsed(self.text)[1]
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(math.prod(shape) * DTYPES[kind].itemsize for kind, shape, *_ in self.rows)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that come back."""
        return sum(
            math.prod(shape) * DTYPES[kind].itemsize for kind, shape, _, wants in self.rows if wants
        )


def _row(kind: torch.dtype, shape: Sequence[int], stride: Sequence[int], wants: bool) -> list[Any]:
    return [NAMES[kind], list(shape), list(stride), wants]


@lru_cache(maxsize=1024)
def _of_one(
    kind: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], wants: bool
) -> TensorMeta:
    """Of one tensor, as most stages return: to write it down takes longer than to know it."""
    return TensorMeta(json.dumps([TENSOR, [_row(kind, shape, stride, wants)]]))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    return json.loads(text)


def laid_out(tensor: Tensor) -> Tensor:
    """The tensor in one piece of memory, in its own order (channels-last) if it is dense."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor  # as most are
    plain = tensor.resolve_conj().resolve_neg()
    return plain if _is_dense(plain) else plain.contiguous()


def orders_of(tensor: Tensor) -> list[tuple[int, ...]]:
    """Strides in which the gradient of a dense tensor may come: its own, those of torch, and all.

    What a layer computes of a gradient follows its strides, in the last bit. Beyond `MOST_DIMS`
    dimensions there are too many, and a gradient in another order than these is copied.
    """
    return _orders_of(tensor.shape, tensor.stride())


@lru_cache(maxsize=1024)
def _orders_of(shape: torch.Size, stride: tuple[int, ...]) -> list[tuple[int, ...]]:
    empty, last = torch.empty(shape, device="meta"), CHANNELS_LAST.get(len(shape))
    kinds = [torch.contiguous_format, *([] if last is None else [last])]
    found = [stride, *(empty.contiguous(memory_format=kind).stride() for kind in kinds)]
    for order in permutations(range(len(shape))) if len(shape) <= MOST_DIMS else ():
        turned = torch.empty([shape[dim] for dim in order], device="meta")
        found.append(turned.permute([order.index(dim) for dim in range(len(shape))]).stride())
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a piece of memory, in whatever order of dimensions."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if tensor.numel() else flat


def _structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TENSOR
    if type(value) in (tuple, list):
        return {type(value).__name__: [_structure(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _structure(item) for key, item in value.items()}}
    if type(value) in PLAIN:
        return {"plain": value}
    raise RequestError(
        asked="to send what a part of the model returns to other ranks",
        found=f"a {type(value).__name__} in it",
        why="they have to be told what to make of the numbers",
        do="return a tensor, or tensors in tuples, lists and dicts",
    )


def _value(structure: Any, tensors: Iterator[Tensor]) -> Any:
    if structure == TENSOR:
        return next(tensors)
    ((kind, inner),) = structure.items()
    if kind == "plain":
        return inner
    if kind == "dict":
        return {key: _value(item, tensors) for key, item in inner.items()}
    items = [_value(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items
