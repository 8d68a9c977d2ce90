"""Tensors as operands of the library: the address of contiguous memory, and a type.

Torch's groups accept the options of a call in several forms: an object of options, or an operation,
a root and a timeout, by name or by position. Here each form becomes an object of options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from allranks.torch.shared_memory.segment import host_identity

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
_IN_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_KINDS: tuple[tuple[Any, str], ...] = (
    (type(ReduceOp.SUM), "op"),
    (ReduceOp, "op"),
    ((timedelta, float), "timeout"),
    (int, "root"),
)


def in_one_form(
    kind: Any, count: int, positional: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The first `count` arguments of a call of torch, and one object of options of that `kind`.

    `positional` and `named` are all arguments. Raises `TypeError` for an argument which torch does
    not know either.
    """
    first, fields = dict(enumerate(positional[:count])), dict[str, Any]()
    options = None
    for value in positional[count:]:
        if isinstance(value, kind):
            options = value
        elif value is not None:
            fields[next((name for of, name in _KINDS if isinstance(value, of)), "")] = value
    for name, value in named.items():
        if name == "opts":
            options = value
        elif name in _IN_OPTIONS:
            fields[name] = value
        else:
            first[_place_of(name)] = value
    fields = {name: value for name, value in fields.items() if value is not None}
    result_options = options or kind()
    is_known = all(hasattr(result_options, _IN_OPTIONS.get(name, "")) for name in fields)
    if sorted(first) != list(range(count)) or not is_known:
        raise TypeError(
            f"a collective of {count} arguments and {kind.__name__} was called with "
            f"{[type(each).__name__ for each in positional]} and {sorted(named)}"
        )
    for name, value in fields.items():
        setattr(result_options, _IN_OPTIONS[name], value)
    return (*(first[place] for place in range(count)), result_options)


def _place_of(name: str) -> int:
    """The position of an argument with this name in any version of torch; -1 if unknown."""
    if name.endswith("split_sizes"):
        return 2 + name.startswith("input")
    if name in ("tensor", "tensors") or name.startswith("output"):
        return 0
    return 1 if name.startswith("input") else -1


def operation_of(options: Any) -> str:
    """The library's name of the operation of these options; "" if it has none."""
    operation = options.reduceOp
    if operation == ReduceOp.SUM:  # faster than the name
        return "sum"
    return _OPERATIONS.get(operation.op.name, "")


def root_of(options: Any, ranks: int) -> int:
    """The root in these options; raises `ValueError` if it is no rank of the group."""
    root = int(options.rootRank)
    if not 0 <= root < ranks:
        raise ValueError(f"the root is rank {root}, and the group has ranks 0 to {ranks - 1}")
    return root


def seconds_of(options: Any, default: float) -> float:
    """The timeout of a call: that of its options, or the group's default."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    if timeout is None or timeout.days < 0:  # negative: not set
        return default
    return timeout.total_seconds() or default


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def is_reducible(tensor: Tensor, operation: str) -> bool:
    """Whether the library can reduce this: dense numbers of its types; complex ones in sums."""
    if not operation or tensor.layout is not torch.strided:
        return False
    dtype = tensor.dtype
    if dtype is torch.float32:  # most are
        return True
    if dtype.is_complex:
        return operation in ("sum", "mean") and dtype.to_real() in TYPES
    if dtype is torch.bool:
        return operation in _OF_TRUTH
    is_mean_of_integers = operation == "mean" and not dtype.is_floating_point
    return dtype in TYPES and not is_mean_of_integers


def are_reducible(tensors: Sequence[Tensor], operation: str) -> bool:
    """Whether the library can reduce each of these."""
    for tensor in tensors:  # noqa: SIM110  # a generator takes longer
        if not is_reducible(tensor, operation):
            return False
    return True


def of_truth(operation: str) -> str:
    """The operation for booleans: a sum is `or`, a product `and`."""
    return _OF_TRUTH[operation]


def codes(library: Any, tensor: Tensor, operation: str) -> tuple[int, int]:
    """The library's codes (type, operation); sums of booleans are `or`."""
    dtype = tensor.dtype
    if dtype.is_complex:
        dtype = dtype.to_real()
    elif dtype is torch.bool:
        operation = of_truth(operation)
    return library.TYPES[TYPES[dtype]], library.OPS[operation]


def numbers_in(tensor: Tensor) -> int:
    """The count of real numbers: a complex one is two."""
    return tensor.numel() * (2 if tensor.dtype.is_complex else 1)


def flat(tensor: Tensor) -> Tensor:
    """Its values in contiguous memory, without a copy if possible."""
    _check_memory(tensor)
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def is_flat(tensor: Tensor) -> bool:
    """Whether its memory is contiguous and has its values (no conjugate or negative view)."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _check_memory(tensor: Tensor) -> None:
    """Raise `TypeError` for a tensor without memory: the library needs an address."""
    if not tensor.data_ptr() and tensor.numel():
        kind = type(tensor).__name__
        raise TypeError(f"a collective of a {kind}, which has no memory of its own: to_local()")


@dataclass(slots=True)
class PostedCall:
    """One call of torch: the library's ops, the memory they use, and what to do afterwards.

    With `copies` its tensors overlap: all are copied first, and written in order at the end.
    """

    ops: list[Any] = field(default_factory=list)
    keep_alive: list[Any] = field(default_factory=list)
    afterwards: list[Callable[[], object]] = field(default_factory=list)
    copies: bool = False

    def source(self, tensor: Tensor) -> Tensor:
        """Contiguous memory with the values of a tensor, which the call reads."""
        if self.copies:
            tensor = flat(tensor).clone()
        elif is_flat(tensor):
            _check_memory(tensor)
        else:
            tensor = flat(tensor)
        self.keep_alive.append(tensor)
        return tensor

    def target(self, tensor: Tensor, *, reads: bool = False) -> Tensor:
        """Contiguous memory for the result `tensor`; with `reads` it has its values first."""
        if not self.copies and is_flat(tensor):
            _check_memory(tensor)
            self.keep_alive.append(tensor)
            return tensor
        if reads:
            memory = flat(tensor).clone() if self.copies else flat(tensor)
        else:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.keep_alive.append(memory)
        self.afterwards.append(lambda: write(tensor, memory))
        return memory

    def scratch(self, like: Tensor, count: int) -> Tensor:
        memory = torch.empty(count, dtype=like.dtype)
        self.keep_alive.append(memory)
        return memory

    def joint_source(self, tensors: Sequence[Tensor]) -> Tensor:
        """The concatenated values of tensors; without a copy if they are adjacent in memory."""
        memory = None if self.copies else in_one_piece(tensors)
        if memory is None:
            memory = torch.cat([flat(tensor).reshape(-1) for tensor in tensors])
        self.keep_alive += [memory, tensors]
        return memory

    def joint_target(self, tensors: Sequence[Tensor]) -> Tensor:
        """Contiguous memory for the results `tensors`, one after another."""
        memory = None if self.copies else in_one_piece(tensors)
        if memory is None:
            memory = self.scratch(tensors[0], sum(tensor.numel() for tensor in tensors))
            self.afterwards.append(lambda: _dealt_out(memory, tensors))
        self.keep_alive += [memory, tensors]
        return memory


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first tensor, if all are adjacent in one storage without gaps, else `None`."""
    first = tensors[0]
    here = first.data_ptr()
    if not here or not is_flat(first):
        return None
    here += first.nbytes
    for tensor in tensors[1:]:
        if tensor.data_ptr() != here or tensor.dtype != first.dtype or not is_flat(tensor):
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        here += tensor.nbytes
    return first


def _dealt_out(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
        write(tensor, part)


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy `values` into a tensor; each element of an expanded tensor is written once."""
    tensor, values = tensor.detach(), values.reshape(tensor.shape)
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def check_parts(call_name: str, parts: Sequence[Tensor], part: Tensor, ranks: int) -> None:
    """Raise `RuntimeError` unless `parts` has a tensor like `part` for each of so many ranks."""
    nbytes, dtype = part.nbytes, part.dtype
    is_right = len(parts) == ranks
    for tensor in parts:
        is_right = is_right and tensor.dtype is dtype and tensor.nbytes == nbytes
    if not is_right:
        sizes = [f"{tensor.numel()} of {tensor.dtype}" for tensor in parts]
        raise RuntimeError(
            f"{call_name}: {ranks} ranks have {part.numel()} values of {part.dtype} each, "
            f"and the list of their tensors {sizes}"
        )


def overlap(*lists: Sequence[Tensor]) -> bool:
    """Whether any two of these tensors share memory."""
    spans = []
    for tensors in lists:
        for t in tensors:
            begin = t.data_ptr()
            spans.append((begin, begin + t.nbytes if t.is_contiguous() else _end_of(t)))
    spans.sort()
    before = 0
    for begin, end in spans:
        if begin < before:
            return True
        before = end
    return False


def _end_of(tensor: Tensor) -> int:
    """The address behind the last value of a tensor."""
    if not tensor.numel():
        return tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


# --- cards ---------------------------------------------------------------------------------------
# The facts which ranks of a group exchange, so that all make the same decision.


@dataclass(frozen=True)
class ProcessCard:
    """One process: its `host`, the place of its `bell`, and the `cores` it may run on.

    `cannot` is the reason why it has no shared memory; empty if it has. `given` identifies the
    memory file from the launcher ("device:inode"); empty if there is none.
    """

    host: str
    pid: int
    bell: str
    cores: tuple[int, ...]
    cannot: str = ""
    given: str = ""


def own_card(bell: str, cannot: str, fd: int) -> ProcessCard:
    host = host_identity()
    file = ""
    if fd >= 0:
        about = os.fstat(fd)
        file = f"{about.st_dev}:{about.st_ino}"
    cannot = cannot or ("" if host else "/proc does not say which host this is")
    return ProcessCard(host, os.getpid(), bell, tuple(os.sched_getaffinity(0)), cannot, file)


def exchanged(store: Any, rank: int, size: int, card: ProcessCard) -> list[ProcessCard]:
    """The cards of all ranks, in order; all ranks call this, once per store."""
    texts = exchange_texts(store, "card", rank, size, json.dumps(asdict(card)))
    rows = [json.loads(text) for text in texts]
    return [ProcessCard(**{**values, "cores": tuple(values["cores"])}) for values in rows]


def exchange_texts(store: Any, key: str, rank: int, size: int, text: str) -> list[str]:
    """The texts of all ranks, in order; all call this, and it waits for all."""
    store.set(f"{key}/{rank}", text)
    return [store.get(f"{key}/{peer}").decode() for peer in range(size)]


def hosts_of(cards: Sequence[ProcessCard]) -> list[list[int]]:
    """The ranks of each host, in the order in which the hosts first appear."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())
