"""Tensors that all ranks of a group can read, and their sums where they lie, without a copy.

Each rank has zeros of the same size; all have mapped those of all. A sum goes through a plan: rank
r adds up chunk r of every leaf, along the fixed tree, and writes it to every rank. The memory goes
with the last tensor in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import merges
from allranks.torch.shared_memory.collectives import SharedMemoryGroup
from allranks.torch.shared_memory.segment import Segment
from allranks.torch.shared_memory.work import SharedMemoryWork

PAGE = 4096
WHERE_BYTES = 64  # the text that says where memory is to be opened

Begin = Callable[[Callable[..., Any]], Any]  # makes a collective, whose wait is then called


class _Memory:
    """This rank's part of memory that the ranks of `group` share; `addresses` has all parts."""

    def __init__(self, segment: Segment, group: SharedMemoryGroup, nbytes: int) -> None:
        self.segment, self.group = segment, group
        self.addresses = tuple(segment.address + rank * nbytes for rank in range(group.size()))
        self.plans: dict[Any, Any] = {}

    def tensor(self, nbytes: int) -> Tensor:
        """All of this rank's part, as bytes; it keeps the memory."""
        own = self.addresses[self.group.rank()]
        part: Any = type("Part", (ctypes.c_char * nbytes,), {})
        whole = part.from_address(own)
        whole.memory = self
        return torch.frombuffer(whole, dtype=torch.uint8)


def shared_zeros(group: Any, count: int, like: Tensor, begin: Begin) -> Tensor:
    """`count` zeros of the type of `like` that the other ranks of `group` can add up in place.

    Every rank of it calls this alike. Where they share no memory, or there is none left on any of
    them, each gets zeros of its own. Sends a line of text to each, twice; `begin` begins such a
    collective, so that a wait for it is seen and told as any other.
    """
    nbytes = max(1, -(-count * like.element_size() // PAGE)) * PAGE
    if not share_memory(group) or like.device.type != "cpu" or like.dtype not in _TYPES:
        return like.new_zeros(count, requires_grad=False)
    segment = _segment(group, nbytes, begin)
    if segment is None:
        return like.new_zeros(count, requires_grad=False)
    memory = _Memory(segment, group, nbytes)
    _memories[memory.addresses[group.rank()]] = memory
    return memory.tensor(nbytes)[: count * like.element_size()].view(like.dtype)


def _segment(group: SharedMemoryGroup, nbytes: int, begin: Begin) -> Segment | None:
    """Memory for all ranks, if every one of them has got it."""
    rank, size = group.rank(), group.size()
    segment: Segment | None = None
    with suppress(OSError):
        segment = Segment.made(size * nbytes, "allranks-buffer") if rank == 0 else None
    where = _told(group, segment.where if segment is not None else "", begin)[0]
    with suppress(OSError):
        if rank and where:
            segment = Segment.opened(where, size * nbytes)
    opened = _told(group, "yes" if segment is not None else "", begin)
    if segment is not None:
        segment.hide()
    return segment if all(opened) else None


def _told(group: SharedMemoryGroup, text: str, begin: Begin) -> list[str]:
    """The short text of every rank."""
    own = torch.zeros(WHERE_BYTES, dtype=torch.uint8)
    data = text.encode()
    own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    every = torch.zeros(group.size() * WHERE_BYTES, dtype=torch.uint8)

    def gather(**_: Any) -> Any:
        return group.allgather_into_tensor_coalesced([every], [own])

    begin(gather).wait()
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in every.view(-1, WHERE_BYTES)]


def share_memory(group: Any) -> bool:
    """Whether the ranks of a group of torch's can add up in place."""
    return isinstance(group, SharedMemoryGroup)


def addresses_of(group: Any, tensor: Tensor) -> tuple[int, ...]:
    """Where `tensor`, the whole of what `shared_zeros` gave, lies on each rank; else nothing."""
    memory = _memories.get(tensor.data_ptr())
    return memory.addresses if memory is not None and memory.group is group else ()


def sum_in_place(group: Any, tensor: Tensor) -> Callable[..., Any] | None:
    """Makes the sum of `tensor` over all ranks begin, if all can read it: every rank calls it."""
    where = addresses_of(group, tensor)
    if not where:
        return None
    ranks = range(len(where))
    return plan_of_sum(
        group, tensor, where, merges(tuple((rank, rank + 1) for rank in ranks), len(where))
    )


def plan_of_sum(
    group: SharedMemoryGroup, into: Tensor, leaves: Sequence[int], order: bytes
) -> Callable[..., Any]:
    """Makes the sum of `leaves`, addresses in shared memory, begin; it goes `into` every rank's.

    Every rank calls what is returned, and has written its own leaves by then.
    """
    memory = _memories[into.data_ptr()]
    key = tuple(leaves), into.numel(), into.dtype
    plan = memory.plans.get(key)
    if plan is None:
        plan = memory.plans[key] = group.library.Plan(
            *(group.library_group, tuple(leaves), memory.addresses, into.numel()),
            *(group.library.TYPES[_TYPES[into.dtype]], order, False),
        )

    def begin(**_: Any) -> SharedMemoryWork:
        return SharedMemoryWork(group, [plan.start()], [into], kept=into, seconds=group.seconds)

    return begin


_TYPES = {
    kind: str(kind).removeprefix("torch.")
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
