"""Tensors in memory that all ranks of a group map, and sums of them in place, without a copy.

Each rank allocates zeros of the same size and maps those of all ranks. A sum goes through a plan:
rank r adds up chunk r of every leaf along the fixed tree, and writes it to every rank. The memory
is freed with the last tensor in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import Span, merges
from allranks.torch.shared_memory.collectives import SharedMemoryGroup
from allranks.torch.shared_memory.operands import TYPES, PostedCall
from allranks.torch.shared_memory.segment import Segment
from allranks.torch.shared_memory.work import SharedMemoryWork

PAGE = 4096
WHERE_BYTES = 64  # of the text that says where to open the memory

Begin = Callable[[Callable[..., Any]], Any]  # begins a collective; the caller waits for it


class _Memory:
    """Shared memory of the ranks of `group`; `addresses` has the part of each rank."""

    def __init__(self, segment: Segment, group: SharedMemoryGroup, nbytes: int) -> None:
        self.segment, self.group = segment, group
        self.addresses = tuple(segment.address + rank * nbytes for rank in range(group.size()))
        self.plans: dict[Any, Any] = {}

    def tensor(self, nbytes: int) -> Tensor:
        """This rank's whole part, as bytes; keeps the memory alive."""
        address = self.addresses[self.group.rank()]
        part: Any = type("Part", (ctypes.c_char * nbytes,), {})
        whole = part.from_address(address)
        whole.memory = self
        return torch.frombuffer(whole, dtype=torch.uint8)


def shared_zeros(group: Any, count: int, like: Tensor, begin: Begin) -> Tensor:
    """`count` zeros of the type of `like` that the other ranks of `group` can add up in place.

    All ranks of it call this with the same arguments. If they share no memory, or one of them has
    none left, each gets private zeros. Two all-gathers of a line of text; `begin` begins them, so
    that a wait for them is reported like any other.
    """
    nbytes = max(1, -(-count * like.element_size() // PAGE)) * PAGE
    is_float = like.dtype.is_floating_point and like.dtype in TYPES
    if not share_memory(group) or like.device.type != "cpu" or not is_float:
        return like.new_zeros(count, requires_grad=False)
    segment = _segment(group, nbytes, begin)
    if segment is None:
        return like.new_zeros(count, requires_grad=False)
    memory = _Memory(segment, group, nbytes)
    _memories[memory.addresses[group.rank()]] = memory
    return memory.tensor(nbytes)[: count * like.element_size()].view(like.dtype)


def _segment(group: SharedMemoryGroup, nbytes: int, begin: Begin) -> Segment | None:
    """Memory which all ranks have mapped; `None` if one of them could not."""
    rank, size = group.rank(), group.size()
    segment: Segment | None = None
    with suppress(OSError):
        segment = Segment.create(size * nbytes, "allranks-buffer") if rank == 0 else None
    where = _exchange_text(group, segment.where if segment is not None else "", begin)[0]
    with suppress(OSError):
        if rank and where:
            segment = Segment.open(where, size * nbytes)
    opened = _exchange_text(group, "yes" if segment is not None else "", begin)
    if segment is not None:
        segment.hide()
    return segment if all(opened) else None


def _exchange_text(group: SharedMemoryGroup, text: str, begin: Begin) -> list[str]:
    """The short texts of all ranks, in order (an all-gather)."""
    line = torch.zeros(WHERE_BYTES, dtype=torch.uint8)
    data = text.encode()
    line[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    lines = torch.zeros(group.size() * WHERE_BYTES, dtype=torch.uint8)

    def gather(**_: Any) -> Any:
        return group.allgather_into_tensor_coalesced([lines], [line])

    begin(gather).wait()
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in lines.view(-1, WHERE_BYTES)]


def share_memory(group: Any) -> bool:
    """Whether the ranks of one of torch's groups can sum in place."""
    return isinstance(group, SharedMemoryGroup)


def addresses_of(group: Any, tensor: Tensor) -> tuple[int, ...]:
    """The addresses of a tensor of `shared_zeros` on all ranks; () for any other tensor."""
    memory = _memories.get(tensor.data_ptr())
    return memory.addresses if memory is not None and memory.group is group else ()


def sum_in_place(group: Any, tensor: Tensor) -> Callable[..., Any] | None:
    """A function with which all ranks begin the sum of `tensor`; `None` if it is not shared."""
    where = addresses_of(group, tensor)
    if not where:
        return None
    return plan_of_sum(group, tensor, where, merges(_one_leaf_each(len(where)), len(where)))


@cache
def _one_leaf_each(ranks: int) -> tuple[Span, ...]:
    return tuple((rank, rank + 1) for rank in range(ranks))


def plan_of_sum(
    group: SharedMemoryGroup, into: Tensor, leaves: Sequence[int], order: bytes
) -> Callable[..., Any]:
    """A function that begins the sum of `leaves`, addresses in shared memory, `into` every rank's.

    All ranks call it, after they have written their own leaves.
    """
    memory = _memories[into.data_ptr()]
    key = tuple(leaves), order, into.numel(), into.dtype
    plan = memory.plans.get(key)
    if plan is None:
        plan = memory.plans[key] = group.library.Plan(
            *(group.library_group, tuple(leaves), memory.addresses, into.numel()),
            *(group.library.TYPES[TYPES[into.dtype]], order, False),
        )

    def begin(**_: Any) -> SharedMemoryWork:
        return SharedMemoryWork(group, PostedCall([plan.start()], [into]), [into], group.seconds)

    return begin


_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
