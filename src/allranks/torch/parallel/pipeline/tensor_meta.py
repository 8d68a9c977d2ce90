"""The metadata of a value with tensors: sent once, and after that only values are sent."""

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
    """Structure, shapes, strides and dtypes of a value; `text` is its JSON."""

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
        """An empty tensor for each, and whether it needs a gradient."""
        return [
            (torch.empty_strided(shape, stride, dtype=DTYPES[kind], device=device), wants)
            for kind, shape, stride, wants in self.rows
        ]

    def value(self, tensors: Iterator[Tensor]) -> Any:
        """The value made of these tensors."""
        return _value(_parsed(self.text)[0], tensors)

    @property
    def shapes(self) -> list[tuple[torch.dtype, list[int], list[int]]]:
        """Dtype, shape and strides of each tensor."""
        return [(DTYPES[kind], shape, stride) for kind, shape, stride, _ in self.rows]

    @property
    def rows(self) -> list[Any]:
        """Dtype, shape and strides of each tensor, and whether it needs a gradient."""
        rows: list[Any] = _parsed(self.text)[1]
        return rows

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(math.prod(shape) * DTYPES[kind].itemsize for kind, shape, *_ in self.rows)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients of its tensors."""
        return sum(
            math.prod(shape) * DTYPES[kind].itemsize for kind, shape, _, wants in self.rows if wants
        )


def _row(kind: torch.dtype, shape: Sequence[int], stride: Sequence[int], wants: bool) -> list[Any]:
    return [NAMES[kind], list(shape), list(stride), wants]


@lru_cache(maxsize=1024)
def _of_one(
    kind: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], wants: bool
) -> TensorMeta:
    """The metadata of a single tensor, as most stages return; cached, as JSON is slow."""
    return TensorMeta(json.dumps([TENSOR, [_row(kind, shape, stride, wants)]]))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    return json.loads(text)


def laid_out(tensor: Tensor) -> Tensor:
    """The tensor in dense memory, with its own strides (channels-last) if it is dense already."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor  # as most are
    plain = tensor.resolve_conj().resolve_neg()
    return plain if _is_dense(plain) else plain.contiguous()


def orders_of(tensor: Tensor) -> list[tuple[int, ...]]:
    """Possible strides of the gradient of a dense tensor: its own, torch's formats, and all orders.

    The last bit of what a layer computes from a gradient depends on its strides. Beyond `MOST_DIMS`
    dimensions there are too many orders, and a gradient with other strides is copied.
    """
    return _orders_of(tensor.shape, tensor.stride())


@lru_cache(maxsize=1024)
def _orders_of(shape: torch.Size, stride: tuple[int, ...]) -> list[tuple[int, ...]]:
    empty, last = torch.empty(shape, device="meta"), CHANNELS_LAST.get(len(shape))
    kinds = [torch.contiguous_format, *([] if last is None else [last])]
    orders = [stride, *(empty.contiguous(memory_format=kind).stride() for kind in kinds)]
    for order in permutations(range(len(shape))) if len(shape) <= MOST_DIMS else ():
        permuted = torch.empty([shape[dim] for dim in order], device="meta")
        orders.append(permuted.permute([order.index(dim) for dim in range(len(shape))]).stride())
    return orders


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill contiguous memory, in any order of dimensions."""
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
