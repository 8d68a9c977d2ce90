"""What a tensor is to the library: an address of flat memory, a type, and how to get it there.

Torch's own groups take what a call says besides its tensors in several forms: an object of options,
or an operation, a root and a time, by name or by place. Here each becomes an object of options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    kind: Any, count: int, given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The first `count` arguments of a call of torch, and one object of options of that `kind`.

    `given` are all arguments by place, `named` those by name. Raises `TypeError` for one that
    torch does not know either.
    """
    first, said = dict(enumerate(given[:count])), dict[str, Any]()
    options = None
    for value in given[count:]:
        if isinstance(value, kind):
            options = value
        elif value is not None:
            said[next((name for of, name in _KINDS if isinstance(value, of)), "")] = value
    for name, value in named.items():
        if name == "opts":
            options = value
        elif name in _IN_OPTIONS:
            said[name] = value
        else:
            first[_place_of(name)] = value
    said = {name: value for name, value in said.items() if value is not None}
    made = options or kind()
    is_known = all(hasattr(made, _IN_OPTIONS.get(name, "")) for name in said)
    if sorted(first) != list(range(count)) or not is_known:
        raise TypeError(
            f"a collective of {count} arguments and {kind.__name__} was called with "
            f"{[type(one).__name__ for one in given]} and {sorted(named)}"
        )
    for name, value in said.items():
        setattr(made, _IN_OPTIONS[name], value)
    return (*(first[place] for place in range(count)), made)


def _place_of(name: str) -> int:
    """Where an argument stands that torch calls by this name, in one version or another."""
    if name.endswith("split_sizes"):
        return 2 + name.startswith("input")
    if name in ("tensor", "tensors") or name.startswith("output"):
        return 0
    return 1 if name.startswith("input") else -1


def operation_of(options: Any) -> str:
    """The library's name of the operation of these options; "" if it has none."""
    operation = options.reduceOp
    if operation == ReduceOp.SUM:  # to ask for a name takes longer
        return "sum"
    return _OPERATIONS.get(operation.op.name, "")


def root_of(options: Any, ranks: int) -> int:
    """The root that these options name; raises `ValueError` if no rank of the group is it."""
    root = int(options.rootRank)
    if not 0 <= root < ranks:
        raise ValueError(f"the root is rank {root}, and the group has ranks 0 to {ranks - 1}")
    return root


def seconds_in(timeout: timedelta | float) -> float:
    """A timeout in seconds: torch's C++ takes a number of them for a `timedelta`, too."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def seconds_of(options: Any, default: float) -> float:
    """How long a call may take: what its options say, or the group's own time."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    if timeout is None or timeout.days < 0:  # what is not set is negative
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
    """What an operation is to truth values: a sum is `or`, a product `and`."""
    return _OF_TRUTH[operation]


def codes(library: Any, tensor: Tensor, operation: str) -> tuple[int, int]:
    """(type, operation) as the library counts them; sums of truth values are `or`."""
    dtype = tensor.dtype
    if dtype.is_complex:
        dtype = dtype.to_real()
    elif dtype is torch.bool:
        operation = of_truth(operation)
    return library.TYPES[TYPES[dtype]], library.OPS[operation]


def numbers_in(tensor: Tensor) -> int:
    """How many real numbers: a complex one is two."""
    return tensor.numel() * (2 if tensor.dtype.is_complex else 1)


def flat(tensor: Tensor) -> Tensor:
    """Its values in one piece of memory, its own if they lie so."""
    _check_memory(tensor)
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def is_flat(tensor: Tensor) -> bool:
    """Whether its values lie in one piece of memory, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _check_memory(tensor: Tensor) -> None:
    """Raise `TypeError` for a tensor that only stands for others: the library needs an address."""
    if not tensor.data_ptr() and tensor.numel():
        found = type(tensor).__name__
        raise TypeError(f"a collective of a {found}, which has no memory of its own: to_local()")


class PostedCall:
    """One call of torch as it is posted: the library's ops, the memory they use, what follows.

    With `copies` its tensors overlap: each is read before anything is written, and written at the
    end, one after another.
    """

    __slots__ = ("afterwards", "copies", "kept", "ops")

    def __init__(
        self,
        ops: Iterable[Any] = (),
        kept: Iterable[Any] = (),
        afterwards: Iterable[Callable[[], object]] = (),
        copies: bool = False,
    ) -> None:
        self.ops, self.kept, self.afterwards = [*ops], [*kept], [*afterwards]
        self.copies = copies

    def given(self, tensor: Tensor) -> Tensor:
        """The values of a tensor, flat, kept until the call is over."""
        if self.copies:
            tensor = flat(tensor).clone()
        elif is_flat(tensor):
            _check_memory(tensor)
        else:
            tensor = flat(tensor)
        self.kept.append(tensor)
        return tensor

    def taken(self, tensor: Tensor, *, reads: bool = False) -> Tensor:
        """Flat memory that becomes the content of `tensor`; with `reads` it begins as that."""
        if not self.copies and is_flat(tensor):
            _check_memory(tensor)
            self.kept.append(tensor)
            return tensor
        if reads:
            memory = flat(tensor).clone() if self.copies else flat(tensor)
        else:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.kept.append(memory)
        self.afterwards.append(lambda: write(tensor, memory))
        return memory

    def scratch(self, like: Tensor, count: int) -> Tensor:
        memory = torch.empty(count, dtype=like.dtype)
        self.kept.append(memory)
        return memory

    def together(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values of tensors one after another in one piece; that which they lie in, if so."""
        there = None if self.copies else in_one_piece(tensors)
        if there is None:
            there = torch.cat([flat(tensor).reshape(-1) for tensor in tensors])
        self.kept += [there, tensors]
        return there

    def apart(self, tensors: Sequence[Tensor]) -> Tensor:
        """One piece of memory that becomes the content of these tensors, one after another."""
        there = None if self.copies else in_one_piece(tensors)
        if there is None:
            there = self.scratch(tensors[0], sum(tensor.numel() for tensor in tensors))
            self.afterwards.append(lambda: _dealt_out(there, tensors))
        self.kept += [there, tensors]
        return there


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first of tensors that follow each other in one storage without a gap, else `None`."""
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
    """Make `values` the content of a tensor; what is expanded is written where it lies, once."""
    tensor, values = tensor.detach(), values.reshape(tensor.shape)
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def check_parts(what: str, parts: Sequence[Tensor], part: Tensor, ranks: int) -> None:
    """Raise `RuntimeError` unless there is a tensor like `part` for each of so many ranks."""
    nbytes, dtype = part.nbytes, part.dtype
    is_right = len(parts) == ranks
    for one in parts:
        is_right = is_right and one.dtype is dtype and one.nbytes == nbytes
    if not is_right:
        sizes = [f"{one.numel()} of {one.dtype}" for one in parts]
        raise RuntimeError(
            f"{what}: {ranks} ranks have {part.numel()} values of {part.dtype} each, "
            f"and the list of their tensors {sizes}"
        )


def overlap(*lists: Sequence[Tensor]) -> bool:
    """Whether two of all these tensors lie in the same memory, in part at least."""
    spans = []
    for tensors in lists:
        for one in tensors:
            begin = one.data_ptr()
            spans.append((begin, begin + one.nbytes if one.is_contiguous() else _end_of(one)))
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
# What each rank of a group tells the others of itself, so that all of them decide alike.


@dataclass(frozen=True)
class ProcessCard:
    """One process: its `host`, where others open its bell, and the memory that it was `given`.

    `cannot` says why it has no shared memory; empty if it has. `cores` are those it may run on.
    `given` is which file the launcher handed it ("device:inode"), empty if none.
    """

    host: str
    pid: int
    bell: str
    cores: tuple[int, ...]
    cannot: str = ""
    given: str = ""


def own_card(bell: str, cannot: str, given_fd: int) -> ProcessCard:
    host = host_identity()
    given = ""
    if given_fd >= 0:
        about = os.fstat(given_fd)
        given = f"{about.st_dev}:{about.st_ino}"
    cannot = cannot or ("" if host else "/proc does not say which host this is")
    return ProcessCard(host, os.getpid(), bell, tuple(os.sched_getaffinity(0)), cannot, given)


def exchanged(store: Any, rank: int, size: int, card: ProcessCard) -> list[ProcessCard]:
    """The cards of all ranks, in order; each rank calls this once per store."""
    said = told_to_all(store, "card", rank, size, json.dumps(asdict(card)))
    made = [json.loads(text) for text in said]
    return [ProcessCard(**{**values, "cores": tuple(values["cores"])}) for values in made]


def told_to_all(store: Any, key: str, rank: int, size: int, text: str) -> list[str]:
    """What each rank says, in order; returns when all have said it."""
    store.set(f"{key}/{rank}", text)
    return [store.get(f"{key}/{peer}").decode() for peer in range(size)]


def hosts_of(cards: Sequence[ProcessCard]) -> list[list[int]]:
    """The ranks of each host, in the order in which the hosts first appear."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())


def one_given(cards: Sequence[ProcessCard]) -> bool:
    """Whether all were handed the same memory by their launcher."""
    return bool(cards[0].given) and len({card.given for card in cards}) == 1
