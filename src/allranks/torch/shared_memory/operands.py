"""What a tensor is to the library: an address of flat memory, a type, and how to get it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "uint8",
}
_OPERATIONS = {
    "SUM": "sum",
    "AVG": "mean",
    "MAX": "max",
    "MIN": "min",
    "PRODUCT": "product",
}
_OF_TRUTH = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def operation_of(options: Any) -> str:
    """The library's name of the operation of these options, or of a `ReduceOp`; "" if it has none.

    Without options it is the sum, as for torch.
    """
    if options is None:
        return "sum"
    asked = getattr(options, "reduceOp", options)
    kind = getattr(asked, "op", asked)
    return _OPERATIONS.get(getattr(kind, "name", ""), "")


def root_of(options: Any) -> int:
    return int(getattr(options, "rootRank", options if isinstance(options, int) else 0))


def seconds_of(options: Any, default: float) -> float:
    """How long a call may take: what its options say, or the group's own time."""
    timeout = getattr(options, "timeout", None)
    seconds = 0.0 if timeout is None else float(timeout.total_seconds())
    return seconds if seconds > 0 else default


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def is_reducible(tensor: Tensor, operation: str) -> bool:
    """Whether the library can reduce this: dense numbers of its types; complex ones in sums."""
    if not operation or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if tensor.is_complex():
        return operation in ("sum", "mean") and tensor.real.dtype in TYPES
    if tensor.dtype == torch.bool:
        return operation in _OF_TRUTH
    is_mean_of_integers = operation == "mean" and not tensor.is_floating_point()
    return tensor.dtype in TYPES and not is_mean_of_integers


def of_truth(operation: str) -> str:
    """What an operation is to truth values: a sum is `or`, a product `and`."""
    return _OF_TRUTH[operation]


def codes(library: Any, tensor: Tensor, operation: str) -> tuple[int, int]:
    """(type, operation) as the library counts them; sums of truth values are `or`."""
    dtype = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    if dtype == torch.bool:
        operation = of_truth(operation)
    return library.TYPES[TYPES[dtype]], library.OPS[operation]


def numbers_in(tensor: Tensor) -> int:
    """How many real numbers: a complex one is two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def flat(tensor: Tensor) -> Tensor:
    """Its values in one piece of memory, its own if they lie so."""
    _check_memory(tensor)
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _check_memory(tensor: Tensor) -> None:
    """Raise `TypeError` for a tensor that only stands for others: the library needs an address."""
    if not tensor.data_ptr() and tensor.numel():
        found = type(tensor).__name__
        raise TypeError(f"a collective of a {found}, which has no memory of its own: to_local()")


@dataclass
class Call:
    """One call of torch as it is posted: the library's ops, the memory they use, what follows."""

    ops: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    afterwards: list[Callable[[], object]] = field(default_factory=list)

    def given(self, tensor: Tensor) -> Tensor:
        """The values of a tensor, flat, kept until the call is over."""
        tensor = flat(tensor)
        self.kept.append(tensor)
        return tensor

    def taken(self, tensor: Tensor, *, reads: bool = False) -> Tensor:
        """Flat memory that becomes the content of `tensor`; with `reads` it begins as that."""
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            _check_memory(tensor)
            self.kept.append(tensor)
            return tensor
        memory = flat(tensor) if reads else torch.empty(tensor.shape, dtype=tensor.dtype)
        self.kept.append(memory)
        self.afterwards.append(lambda: tensor.detach().copy_(memory))
        return memory

    def scratch(self, like: Tensor, count: int) -> Tensor:
        memory = torch.empty(count, dtype=like.dtype)
        self.kept.append(memory)
        return memory

    def together(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values of tensors one after another in one piece; that which they lie in, if so."""
        there = in_one_piece(tensors)
        if there is None:
            there = torch.cat([flat(tensor).reshape(-1) for tensor in tensors])
        self.kept += [there, tensors]
        return there

    def apart(self, tensors: Sequence[Tensor]) -> Tensor:
        """One piece of memory that becomes the content of these tensors, one after another."""
        there = in_one_piece(tensors)
        if there is None:
            there = self.scratch(tensors[0], sum(tensor.numel() for tensor in tensors))
            self.afterwards.append(lambda: _dealt_out(there, tensors))
        self.kept += [there, tensors]
        return there


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first of tensors that follow each other in one storage without a gap, else `None`."""
    first = tensors[0]
    here = first.data_ptr()
    if not here:
        return None
    for tensor in tensors:
        fits = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (fits and same and tensor.data_ptr() == here and tensor.dtype == first.dtype):
            return None
        here += tensor.nbytes
    return first


def _dealt_out(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
