"""Shard arithmetic: who works on which samples of the global batch. Pure functions of integers.

The global batch is cut into a fixed number of shards, whatever the number of ranks. A rank owns
a run of whole shards; what goes through the model at once (a micro-batch) is made of pieces of
them. Called by the data of every engine, by the planner of a place, and by the cards.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple


@dataclass(frozen=True)
class Piece:
    """Samples `start:stop` of one shard that holds `shard_size` samples in this step."""

    shard: int
    start: int
    stop: int
    shard_size: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


Micro = tuple[Piece, ...]


class ShardRun(NamedTuple):
    """`pieces` that follow each other, each of `samples`; of shards of one sample if `lone`."""

    pieces: int
    samples: int
    lone: bool


Runs = tuple[ShardRun, ...]


@lru_cache(maxsize=256)
def runs_of(pieces: Micro) -> Runs:
    """The runs of a micro-batch in the order of its samples: two, or three if some are lone."""

    def kind(piece: Piece) -> tuple[int, bool]:
        return piece.samples, piece.shard_size == 1

    return tuple(ShardRun(len(list(run)), *of) for of, run in groupby(pieces, kind))


@lru_cache(maxsize=64)
def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` even runs, longer ones first: 5 in 8 is 1 1 1 1 1 0 0 0."""
    size, longer = divmod(total, parts)
    return tuple(size + (part < longer) for part in range(parts))


@dataclass(frozen=True)
class Shares:
    """How many shards each rank owns; their runs follow each other in rank order."""

    counts: tuple[int, ...]

    @classmethod
    def even(cls, shards: int, ranks: int) -> Shares:
        """As even as possible: 8 shards on 3 ranks are 3, 3 and 2."""
        return cls(even_sizes(shards, ranks))

    @classmethod
    def by_weights(cls, shards: int, weights: Sequence[float]) -> Shares:
        """In proportion to `weights`, which are positive: the method of largest remainders.

        Each rank owns at least one shard, if there are as many shards as ranks.
        """
        exact = [shards * weight / sum(weights) for weight in weights]
        least = int(shards >= len(weights))
        counts = [max(least, math.floor(share)) for share in exact]
        ranks = range(len(weights))
        while sum(counts) > shards:
            counts[max(ranks, key=lambda r: (counts[r] > least, counts[r] - exact[r]))] -= 1
        while sum(counts) < shards:
            counts[max(ranks, key=lambda r: (exact[r] - counts[r], -r))] += 1
        return cls(tuple(counts))

    @classmethod
    def by_speed(cls, shards: int, seconds_per_shard: Sequence[float]) -> Shares:
        """The shares whose slowest rank takes the least time; of equal ones the first ranks' own.

        Each rank owns at least one shard, if there are as many shards as ranks.
        """
        least = int(shards >= len(seconds_per_shard))
        counts = [least] * len(seconds_per_shard)
        ends = [((least + 1) * each, rank) for rank, each in enumerate(seconds_per_shard)]
        heapq.heapify(ends)
        for _ in range(shards - sum(counts)):
            _, rank = ends[0]
            counts[rank] += 1
            heapq.heapreplace(ends, ((counts[rank] + 1) * seconds_per_shard[rank], rank))
        return cls(tuple(counts))

    @property
    def shards(self) -> int:
        return sum(self.counts)

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def are_even(self) -> bool:
        """Whether they are those of a job without `--share`."""
        return self.counts == even_sizes(self.shards, self.ranks)

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """The shards of each rank."""
        ends = accumulate(self.counts)
        return tuple(range(end - n, end) for end, n in zip(ends, self.counts, strict=True))

    def owned(self, rank: int) -> range:
        """The run of shards that `rank` owns: together all of them, in rank order, none twice."""
        return self.runs[rank]

    def seconds(self, seconds_per_shard: Sequence[float]) -> float:
        """How long the slowest rank takes, if each shard costs a rank so much."""
        return max(n * each for n, each in zip(self.counts, seconds_per_shard, strict=True))


def owned_shards(shards: int, ranks: int, rank: int) -> range:
    """The run of shards that `rank` owns where shares are even."""
    return Shares.even(shards, ranks).owned(rank)


def busy_fraction(shards: int, ranks: int) -> float:
    """The part of the ranks' time that has work in it: 6 ranks on 8 shards -> 0.67."""
    return shards / (ranks * max(even_sizes(shards, ranks)))


def largest_shard(batch_size: int, shards: int) -> int:
    """Samples of the largest shard of a full batch."""
    return max(even_sizes(batch_size, shards))


def micro_batches(sizes: dict[int, int], limit: int | None) -> tuple[Micro, ...]:
    """Group the shards in `sizes` (shard -> samples, in order) into micro-batches of <= `limit`.

    Whole shards go together as long as they fit; a shard larger than the limit is cut (callers
    refuse that beforehand for models with batch statistics). Empty shards are left out. `None`
    means no limit.
    """
    done: list[Micro] = []
    open_: list[Piece] = []
    for shard, size in sizes.items():
        if limit is not None and open_ and sum(p.samples for p in open_) + size > limit:
            done.append(tuple(open_))
            open_ = []
        step = size if limit is None else min(size, limit)
        for start in range(0, size, step or 1):
            piece = Piece(shard, start, min(start + step, size), size)
            if size > step:
                done.append((piece,))
            else:
                open_.append(piece)
    return (*done, tuple(open_)) if open_ else tuple(done)


def smaller_micro_batch(samples: int, largest: int, *, whole: bool) -> int | None:
    """The limit to try when a pass of `samples` runs out of memory; `None` if there is none.

    Half of it, in whole shards of `largest` samples. If one shard is too much, half a shard and so
    on, unless shards stay `whole`: their samples are then summed in one pass, in one order.
    """
    if samples > largest:
        return max(samples // 2 // largest, 1) * largest
    return None if whole else samples // 2 or None


def rows_of(rows: int, ranks: int, rank: int) -> range:
    """The rows of a tensor that `rank` holds of it, cut as torch.chunk does: 10, 4 -> 3 3 3 1.

    The last ranks may have none.
    """
    chunk = -(-rows // ranks)
    return range(min(rank * chunk, rows), min((rank + 1) * chunk, rows))


def balanced_ends(costs: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` runs of `costs` ends, so that the dearest run is as cheap as can be.

    No run is empty: there are at least as many costs as parts. Of equal ways the one with early
    ends: the linear partition problem, by dynamic programming.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ways: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for part in range(1, parts + 1):
        ways = {
            end: min(
                (max(dearest, sums[end] - sums[start]), [*ends, end])
                for start, (dearest, ends) in ways.items()
                if start < end
            )
            for end in range(part, len(costs) - (parts - part) + 1)
        }
    return ways[len(costs)][1]
