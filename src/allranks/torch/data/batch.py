"""What a step works on: one rank's part of a global batch, its leaves and its micro-batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from allranks.strategies.shards import Micro
from allranks.torch.data.copying import OnItsWay
from allranks.torch.data.sources import Ids


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
    this rank's samples in the data set, in order (none for a stream). With `passes` every rank goes
    through the model so often, with samples of no weight where it has too few (0: as often as it
    has micro-batches). `spare` is what a rank without a sample goes through the model with, if it
    has to (`cutting`); it is no part of what the rank trains with.
    """

    index: int
    epoch: int
    step_in_epoch: int
    nominal: int
    sizes: tuple[int, ...] | None
    leaves: tuple[Leaf, ...]
    ids: Ids
    passes: int = 0
    spare: MicroBatch | None = None

    @property
    def micros(self) -> list[MicroBatch]:
        """What goes through the model of this rank, in order; `data` of each is as collated."""
        return [micro for leaf in self.leaves for micro in leaf.micros]

    @property
    def to_read(self) -> list[MicroBatch]:
        """The micro-batches whose data is read: those of this rank, and the `spare` one."""
        return self.micros if self.spare is None else [*self.micros, self.spare]

    @property
    def passes_without_weight(self) -> int:
        """How often this rank goes through the model for the others alone."""
        return max(0, self.passes - len(self.micros))

    def with_data(self, leaves: tuple[Leaf, ...], spare: MicroBatch | None) -> Batch:
        """The same, its data read. In every step, and `dataclasses.replace` takes twice as long."""
        where = self.index, self.epoch, self.step_in_epoch, self.nominal, self.sizes
        return Batch(*where, leaves, self.ids, self.passes, spare)

    @property
    def own_samples(self) -> int:
        """The samples of this rank; those of all ranks are in the `StepResult`."""
        return sum(micro.samples for micro in self.micros)


def samples_of(pieces: Micro, read: dict[int, list[Any]]) -> list[Any]:
    """The samples of some pieces, in order, from those that were read of each shard."""
    return [s for piece in pieces for s in read[piece.shard][piece.start : piece.stop]]


def with_data(
    plans: Iterator[Batch], data: Iterator[OnItsWay]
) -> Generator[tuple[Batch, list[OnItsWay]]]:
    """Each batch of `plans` with the data of what is read for it, on its way."""
    for plan in plans:
        yield plan, [next(data) for _ in plan.to_read]
