"""The global batch of each step, as one rank sees it: its shards, cut into micro-batches.

Nobody communicates: which samples a step uses, how they are cut into shards, and which rank owns
which shard are arithmetic (`order`, `shards`). A stream is the exception: only reading it tells
how much is left, so the step itself finds out, and no step waits for a rank that has run dry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, tee
from typing import Any

import numpy as np
import torch

from allranks.errors import RequestError
from allranks.on_torch.nested import placed
from allranks.on_torch.sources import Ids, Source, StreamSource, seed_generators
from allranks.order import Order, random_key
from allranks.shards import Micro, even_sizes, micro_batches, owned_shards

NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True)
class Progress:
    """How far a job is. All counts belong to the job; a skipped update moves only the first four.

    `loss_sum` and `weight_sum` are those of the epoch that is going on.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    batch_index: int = 0
    samples_seen: int = 0
    updates: int = 0
    loss_sum: float = 0.0
    weight_sum: float = 0.0


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once: pieces of shards, and their collated samples."""

    pieces: Micro
    samples: int
    data: Any = None


@dataclass(frozen=True)
class Leaf:
    """Shards whose gradients add up before anything is exchanged, with their micro-batches."""

    shards: range
    micros: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Batch:
    """One rank's part of the global batch of one step.

    `nominal` is what gradients are divided by before they are exchanged, in samples; `sizes` the
    samples of every shard of the job, or `None` where only a stream knows; `ids` the numbers of
    this rank's samples in the data set, in order (none for a stream).
    """

    index: int
    epoch: int
    step_in_epoch: int
    nominal: int
    sizes: tuple[int, ...] | None
    leaves: tuple[Leaf, ...]
    ids: Ids

    @property
    def micros(self) -> list[MicroBatch]:
        return [micro for leaf in self.leaves for micro in leaf.micros]

    @property
    def own_samples(self) -> int:
        return sum(micro.samples for micro in self.micros)


@dataclass
class GlobalBatches:
    """The batches of a job for the reader `rank` of `ranks`.

    `shard_alone` makes every shard a leaf; floating-point data is cast to `floating`. `dry` is set
    by the trainer once a step of a stream has found no sample on any rank.
    """

    source: Source | StreamSource
    batch_size: int
    shards: int
    last_batch: str
    seed: int
    rank: int
    ranks: int
    micro_batch: int | None
    shard_alone: bool
    device: torch.device
    floating: torch.dtype
    dry: bool = False

    def __post_init__(self) -> None:
        self._leaves_of: dict[tuple[int, ...], tuple[Leaf, ...]] = {}
        self.owned = owned_shards(self.shards, self.ranks, self.rank)
        if self.steps_per_epoch == 0:
            assert not isinstance(self.source, StreamSource)
            raise RequestError(
                asked="last_batch = drop",
                found=f"{len(self.source)} samples, batch_size = {self.batch_size}",
                why="the only batch of an epoch would be dropped",
                do=f"--set batch_size={len(self.source)}, or --set last_batch=keep",
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; `None` for a stream, which nobody can know."""
        return None if isinstance(self.source, StreamSource) else self._order().steps_per_epoch

    def _order(self) -> Order:
        assert not isinstance(self.source, StreamSource)
        return Order(len(self.source), self.batch_size, self.seed, self.last_batch)

    def after(self, done: Progress, epochs: int, steps: int | None) -> Iterator[Batch]:
        """The batches that follow `done`, to the end of `epochs` epochs or of `steps` steps."""
        if isinstance(self.source, StreamSource):
            yield from self._from_streams(self.source, done, epochs, steps)
            return
        ahead, now = tee(self._plans(done, epochs, steps))  # loader workers read ahead
        data = self.source.batches((plan.epoch, ids) for plan in ahead for ids in self._ids(plan))
        for plan in now:
            leaves = tuple(
                Leaf(leaf.shards, tuple(self._filled(m, next(data)) for m in leaf.micros))
                for leaf in plan.leaves
            )
            yield replace(plan, leaves=leaves)

    def _plans(self, done: Progress, epochs: int, steps: int | None) -> Iterator[Batch]:
        """The batches without their data: arithmetic only."""
        order = self._order()
        epoch, step, index = done.epoch, done.step_in_epoch, done.batch_index
        while True:
            if step >= order.steps_per_epoch:
                epoch, step = epoch + 1, 0
            if epoch >= epochs or (steps is not None and index >= steps):
                return
            chosen = order.batch(epoch, step)
            sizes = even_sizes(len(chosen), self.shards)
            first = sum(sizes[: self.owned.start])
            own = chosen[first : first + sum(sizes[k] for k in self.owned)]
            yield Batch(index, epoch, step, len(chosen), sizes, self._leaves(sizes), own)
            step, index = step + 1, index + 1

    def _ids(self, plan: Batch) -> Iterator[Ids]:
        """The sample numbers of each micro-batch, in order."""
        start = 0
        for micro in plan.micros:
            yield plan.ids[start : start + micro.samples]
            start += micro.samples

    def _leaves(self, sizes: tuple[int, ...]) -> tuple[Leaf, ...]:
        """The leaves of this rank for shards of these sizes, data still missing."""
        if sizes not in self._leaves_of:
            owned = {shard: sizes[shard] for shard in self.owned}
            groups = [{k: size} for k, size in owned.items()] if self.shard_alone else [owned]
            self._leaves_of[sizes] = tuple(
                Leaf(
                    range(min(group), max(group) + 1),
                    tuple(
                        MicroBatch(m, sum(piece.samples for piece in m))
                        for m in micro_batches(group, self.micro_batch)
                    ),
                )
                for group in groups
            )
        return self._leaves_of[sizes]

    def _filled(self, micro: MicroBatch, data: Any) -> MicroBatch:
        return MicroBatch(micro.pieces, micro.samples, placed(data, self.device, self.floating))

    def _from_streams(
        self, source: StreamSource, done: Progress, epochs: int, steps: int | None
    ) -> Iterator[Batch]:
        quota = even_sizes(self.batch_size, self.shards)
        epoch, step, index = done.epoch, done.step_in_epoch, done.batch_index
        while epoch < epochs:
            streams = {k: source.open(k, epoch, step * quota[k]) for k in self.owned}
            self.dry = False
            while not self.dry:
                if steps is not None and index >= steps:
                    return
                read = {}
                for k, stream in streams.items():  # its randomness belongs to the shard and step
                    seed_generators(random_key(self.seed, epoch, k, step))
                    read[k] = list(islice(stream, quota[k]))
                leaves = tuple(
                    Leaf(
                        leaf.shards,
                        tuple(
                            self._filled(m, source.collate(_samples(m.pieces, read)))
                            for m in leaf.micros
                        ),
                    )
                    for leaf in self._leaves(
                        tuple(len(read.get(k, ())) for k in range(self.shards))
                    )
                )
                yield Batch(index, epoch, step, self.batch_size, None, leaves, NO_IDS)
                step, index = step + 1, index + 1
            if step == 1:
                raise RequestError(
                    asked=f"epoch {epoch} of a stream",
                    found="no sample in any shard",
                    why="an epoch without a step would never end",
                    do="let open(shard, epoch, seed, skip) yield samples",
                )
            epoch, step, index = epoch + 1, 0, index - 1


def _samples(pieces: Micro, read: dict[int, list[Any]]) -> list[Any]:
    return [s for piece in pieces for s in read[piece.shard][piece.start : piece.stop]]
