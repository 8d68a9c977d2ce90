"""Sums of packed buckets of which each rank is left with its own section alone.

`MeanSections` adds by reduce-scatter, as often as a bucket is launched; `TreeSections` along the
fixed tree over all shards, so that every element has the bits that `ddp:reduce=tree` gives it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.reducers.packed import PackedBucket
from allranks.torch.reducers.tree import TreeChunks, TreeSum

IN_FLIGHT = 2  # buckets that are sent while backward fills the next one


class Sections(ABC):
    """The sections of this rank of all buckets. Every rank makes the same calls in one order."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards

    @abstractmethod
    def prepare(self, buckets: Sequence[PackedBucket]) -> None:
        """Learn the buckets, whenever they change."""

    @abstractmethod
    def launch(self, bucket: int, flat: Tensor, leaf: Span, *, last: bool) -> None:
        """Take in what this rank has for a bucket, of which nobody else keeps anything.

        After the `last` leaf nothing more comes for it in this step.
        """

    @abstractmethod
    def finish(self) -> list[Tensor]:
        """Wait; returns the sum of each bucket in this rank's section, and forgets it."""


class MeanSections(Sections):
    """Reduce-scatter, in whatever order it adds. What is launched twice adds up."""

    def prepare(self, buckets: Sequence[PackedBucket]) -> None:
        self._buckets = list(buckets)
        self._sums: dict[int, Tensor] = {}
        self._under_way: deque[tuple[int, Pending, Tensor, Tensor]] = deque()

    def launch(self, bucket: int, flat: Tensor, leaf: Span, *, last: bool) -> None:
        if self.comm.size == 1:
            self._take(bucket, flat)
            return
        while len(self._under_way) >= IN_FLIGHT:
            self._wait()
        part = flat.new_empty(self._buckets[bucket].section)
        self._under_way.append((bucket, self.comm.reduce_scatter(part, flat), part, flat))

    def finish(self) -> list[Tensor]:
        while self._under_way:
            self._wait()
        sums, self._sums = self._sums, {}
        return [self._sum_of(sums, number) for number in range(len(self._buckets))]

    def _sum_of(self, sums: dict[int, Tensor], number: int) -> Tensor:
        """Zeros, where no rank had a pass."""
        bucket = self._buckets[number]
        if number in sums:
            return sums[number]
        return torch.zeros(bucket.section, dtype=bucket.dtype, device=bucket.device)

    def _wait(self) -> None:
        bucket, pending, part, _ = self._under_way.popleft()
        pending.wait()
        self._take(bucket, part)

    def _take(self, bucket: int, part: Tensor) -> None:
        if bucket in self._sums:
            self._sums[bucket].add_(part)
        else:
            self._sums[bucket] = part


class TreeSections(Sections):
    """The fixed tree, without the all-gather at its end. Holds every bucket whole."""

    def prepare(self, buckets: Sequence[PackedBucket]) -> None:
        self._sizes = [bucket.section for bucket in buckets]
        self._trees = [TreeSum(self.shards) for _ in buckets]
        self._received: dict[int, tuple[Tensor, Pending]] = {}
        self._chunks = TreeChunks(self.comm, self.shards)

    def launch(self, bucket: int, flat: Tensor, leaf: Span, *, last: bool) -> None:
        tree = self._trees[bucket]
        tree.add(leaf, [flat], borrowed=False)
        if last:
            roots = [tensors[0] for _, tensors in tree.roots]
            alone = self.comm.size == 1
            self._received[bucket] = (roots[0], Pending()) if alone else self._chunks.give(roots)
            self._trees[bucket] = TreeSum(self.shards)

    def finish(self) -> list[Tensor]:
        sums = []
        for bucket, size in enumerate(self._sizes):
            received, pending = self._received.pop(bucket)
            pending.wait()
            sums.append(received if self.comm.size == 1 else self._chunks.total(received, size))
        return sums
