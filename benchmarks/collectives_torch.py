"""A rank of torch in `collectives.py`: Gloo, ours through torch, and ours by itself.

Gloo                  torch.distributed on Gloo
allranks, torch       torch.distributed on the backend "shared_memory"
allranks              the library by itself, any memory: copied in and out
allranks, in place    the library by itself, memory that all ranks share: as gradient buckets
"""

from __future__ import annotations

import ctypes
import gc
import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from collectives_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    ITEM,
    REDUCE_SCATTER,
    Call,
    Library,
    Timing,
    Values,
)
from turns import answer_asked

from allranks.strategies.reduction_tree import merges
from allranks.torch.shared_memory.backend import library_group_of, register
from allranks.torch.shared_memory.posting import BACKEND
from allranks.torch.shared_memory.segment import Segment, library

GLOO, BY_TORCH, BY_ITSELF = "Gloo", "allranks, torch", "allranks"
IN_PLACE = "allranks, in place"


class ByTorch(Library):
    """`torch.distributed` on one of its groups."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier(self.group)

    def call_of(self, kind: str, given: Values, taken: Values) -> Call:
        source, target = torch.from_numpy(given), torch.from_numpy(taken)
        group = self.group
        if kind == ALL_REDUCE:
            return partial(dist.all_reduce, target, group=group)
        if kind == REDUCE_SCATTER:
            return partial(dist.reduce_scatter_single, target, source, group=group)
        if kind == ALL_GATHER:
            return partial(dist.all_gather_single, target, source, group=group)
        if kind == BROADCAST:
            roots = itertools.cycle(range(self.ranks))
            return lambda: dist.broadcast(target, next(roots), group=group)
        other = self.rank ^ 1
        ways: list[Call] = [
            partial(dist.send, source, other, group=group),
            partial(dist.recv, target, other, group=group),
        ]
        return _one_after_the_other(ways if self.rank < other else ways[::-1])

    def memory_of(self, kind: str, nbytes: int) -> tuple[Values, Values]:
        """An all-reduce of torch writes where it reads."""
        given, taken = super().memory_of(kind, nbytes)
        return (taken, taken) if kind == ALL_REDUCE else (given, taken)


class ByItself(Library):
    """The library's own group, as it was made for torch's."""

    def __init__(self, group: Any) -> None:
        self.native, self.group = library(), library_group_of(group)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.kinds = self.native.TYPES["float32"], self.native.OPS["sum"]

    def barrier(self) -> None:
        self.group.barrier().wait()

    def call_of(self, kind: str, given: Values, taken: Values) -> Call:
        group, source, target = self.group, given.ctypes.data, taken.ctypes.data
        if kind == ALL_REDUCE:
            asked = source, target, len(given), *self.kinds
            return lambda: group.all_reduce(*asked).wait()
        if kind == REDUCE_SCATTER:
            asked = source, target, len(taken), *self.kinds
            return lambda: group.reduce_scatter(*asked).wait()
        if kind == ALL_GATHER:
            return lambda: group.all_gather(source, target, given.nbytes).wait()
        if kind == BROADCAST:
            roots = itertools.cycle(range(self.ranks))
            return lambda: group.broadcast(target, taken.nbytes, next(roots)).wait()
        other = self.rank ^ 1
        ways: list[Call] = [
            lambda: group.send(source, given.nbytes, other, 0).wait(),
            lambda: group.receive(target, taken.nbytes, other, 0).wait(),
        ]
        return _one_after_the_other(ways if self.rank < other else ways[::-1])


class InPlace(ByItself):
    """A plan over memory that every rank has mapped: no copy in, no copy out."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.kept: list[Any] = []  # segments: NumPy holds only their addresses

    def memory_of(self, kind: str, nbytes: int) -> tuple[Values, Values]:
        """Leaves and targets in one segment per rank; an all-reduce writes where it reads."""
        own = Segment.create(nbytes, "benchmark")
        where: list[str] = [""] * self.ranks
        dist.all_gather_object(where, own.where)
        self.segments = [
            own if rank == self.rank else Segment.open(place, nbytes)
            for rank, place in enumerate(where)
        ]
        dist.barrier()
        self.kept += self.segments
        leaf = _values_at(own, nbytes)
        share = nbytes // ITEM // self.ranks
        taken = leaf[self.rank * share :][:share] if kind == REDUCE_SCATTER else leaf
        taken[:] = 0
        return leaf, taken

    def call_of(self, kind: str, given: Values, taken: Values) -> Call:
        if kind == REDUCE_SCATTER:  # every rank writes to its own chunk alone
            return self._plan(len(taken), scatter=True)
        assert kind == ALL_REDUCE
        return self._plan(len(given), scatter=False)

    def _plan(self, count: int, scatter: bool) -> Call:
        addresses = tuple(segment.address for segment in self.segments)
        targets = addresses
        if scatter:
            targets = tuple(address + rank * count * ITEM for rank, address in enumerate(addresses))
        plan = self.native.Plan(
            *(self.group, addresses, targets, count, self.kinds[0]),
            *(merges(tuple((rank, rank + 1) for rank in range(self.ranks)), self.ranks), scatter),
        )
        return lambda: plan.start().wait()


def _values_at(segment: Segment, nbytes: int) -> Values:
    there = (ctypes.c_float * (nbytes // ITEM)).from_address(segment.address)
    return np.frombuffer(there, np.float32)


def _one_after_the_other(calls: list[Call]) -> Call:
    first, second = calls

    def call() -> None:
        first()
        second()

    return call


def serve(rank: int, ranks: int, address: str, store: str) -> None:
    """Join the ranks, and answer until there are no more questions."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    register()
    shared = dist.new_group(backend=BACKEND)
    libraries: dict[str, Library] = {GLOO: ByTorch(None), BY_TORCH: ByTorch(shared)}
    libraries |= {BY_ITSELF: ByItself(shared), IN_PLACE: InPlace(shared)}
    gc.freeze()
    answer_asked(address, rank, Timing(libraries).answer)
    dist.barrier()
    dist.destroy_process_group()
