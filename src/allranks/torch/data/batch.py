"""What a step works on: one rank's part of a global batch, its leaves and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.shards import Micro, even_sizes, micro_batches, owned_shards
from allranks.torch.data.collate import map_tensors, structure_of, tensors_in
from allranks.torch.data.copying import AsyncCopy
from allranks.torch.data.sources import Ids
from allranks.torch.task import Task


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
    plans: Iterator[Batch], data: Iterator[AsyncCopy]
) -> Generator[tuple[Batch, list[AsyncCopy]]]:
    """Each batch of `plans` with the data of what is read for it, on its way."""
    for plan in plans:
        yield plan, [next(data) for _ in plan.to_read]


# --- cutting -------------------------------------------------------------------------------------
# How a global batch is cut: into leaves and micro-batches of each rank. Arithmetic, without data.
#
# A rank that has no sample of a batch may still have to go through the model, because passes
# communicate, or to know what it returns, because outputs of all ranks are put together. It then
# takes the first samples of the same global batch (`spare`), which another rank trains with: so no
# step depends on an earlier one, and what is not finite in them is not finite in the step anyway.
# Of a stream, of which nobody knows what others read, it takes those that it has read last.


Sizes = tuple[int, ...]
"""The samples of every shard of a global batch."""


@dataclass
class Cutting:
    """Cuts the global batches of a job for the reader `rank` of `ranks`.

    `shard_alone` makes every shard a leaf, `collates_alone` a micro-batch; `cut_for` cuts
    micro-batches as so many ranks would. With `counts_passes` batches say how many passes the rank
    with the most makes; with `needs_spare` a rank without a sample is given one.
    """

    shards: int
    rank: int
    ranks: int
    micro_batch: int | None
    shard_alone: bool
    cut_for: int = 0
    counts_passes: bool = False
    needs_spare: bool = False
    collates_alone: bool = False
    _cuts: dict[int, tuple[Sizes, int, int]] = field(default_factory=dict)
    _leaves: dict[Sizes, tuple[Leaf, ...]] = field(default_factory=dict)
    _passes: dict[Sizes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owned = owned_shards(self.shards, self.ranks, self.rank)

    def begin_collating_alone(self) -> None:
        """From now on every shard is a micro-batch."""
        self.collates_alone = True
        self._leaves.clear()
        self._passes.clear()

    def cut(self, samples: int) -> tuple[Sizes, int, int]:
        """The sizes of all shards of a batch; its first sample on this rank, and how many."""
        if samples not in self._cuts:
            sizes = even_sizes(samples, self.shards)
            own = sum(sizes[k] for k in self.owned)
            self._cuts[samples] = sizes, sum(sizes[: self.owned.start]), own
        return self._cuts[samples]

    def leaves(self, sizes: Sizes) -> tuple[Leaf, ...]:
        """The leaves of this rank for shards of these sizes, data still missing."""
        if sizes not in self._leaves:
            self._leaves[sizes] = self._leaves_for(sizes, self.owned)
        return self._leaves[sizes]

    def passes(self, sizes: Sizes) -> int:
        """How often the rank with the most micro-batches goes through the model, if all are to."""
        if not self.counts_passes:
            return 0
        if sizes not in self._passes:
            spans = (owned_shards(self.shards, self.ranks, rank) for rank in range(self.ranks))
            each = (self._leaves_for(sizes, span) for span in spans)
            self._passes[sizes] = max(sum(len(leaf.micros) for leaf in own) for own in each)
        return self._passes[sizes]

    def spare(self, sizes: Sizes) -> MicroBatch | None:
        """What this rank goes through the model with where it has no sample: the first samples.

        `None` where it has samples, or needs none.
        """
        if not self.needs_spare or any(leaf.micros for leaf in self.leaves(sizes)):
            return None
        return self.first_of(dict(enumerate(sizes)))

    def first_of(self, sizes: dict[int, int]) -> MicroBatch:
        """What of shards of these sizes goes through the model first."""
        first = next(shard for shard, size in sizes.items() if size)
        micro = micro_batches({first: sizes[first]}, self.micro_batch)[0]
        return MicroBatch(micro, sum(piece.samples for piece in micro))

    def _leaves_for(self, sizes: Sizes, owned_by_it: range) -> tuple[Leaf, ...]:
        owned = {shard: sizes[shard] for shard in owned_by_it}
        groups = [{k: size} for k, size in owned.items()] if self.shard_alone else [owned]
        return tuple(
            Leaf(
                range(min(group), max(group) + 1),
                tuple(
                    MicroBatch(m, sum(piece.samples for piece in m))
                    for part in self._parts(group)
                    for m in self._micros_of(part)
                ),
            )
            for group in groups
        )

    def _micros_of(self, group: dict[int, int]) -> tuple[Micro, ...]:
        """What of these shards goes through the model at once.

        Shards that are collated alone are: what is drawn there belongs to the shard.
        """
        if not self.collates_alone:
            return micro_batches(group, self.micro_batch)
        alone = (micro_batches({k: size}, self.micro_batch) for k, size in group.items())
        return tuple(micro for micros in alone for micro in micros)

    def _parts(self, group: dict[int, int]) -> list[dict[int, int]]:
        """What never goes through the model together: the shards that other ranks would own."""
        if not self.cut_for:
            return [group]
        spans = [owned_shards(self.shards, self.cut_for, rank) for rank in range(self.cut_for)]
        return [{k: group[k] for k in span if k in group} for span in spans]


# --- shares --------------------------------------------------------------------------------------
# A micro-batch cut into shares of whole pieces, and what comes of them joined again.
#
# Used where several passes make up a micro-batch: replicas on devices, pieces in flight.


PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class ShareUse:
    """Who asked for it, and what the shares are for: the words of what is refused."""

    asked: str
    whose: str


def shares_of(pieces: Micro, most: int) -> list[Micro]:
    """What each has of a micro-batch: whole pieces, in order, as even as can be.

    Fewer pieces than `most` leave the last ones without a share.
    """
    spans = [owned_shards(len(pieces), most, number) for number in range(most)]
    return [pieces[span.start : span.stop] for span in spans if span]


def samples_in(pieces: Micro) -> int:
    return sum(piece.samples for piece in pieces)


def scattered(
    data: Any, samples: int, shares: Sequence[Micro], devices: Sequence[torch.device], cut: ShareUse
) -> list[Any]:
    """The rows of each share, on its device; what has no rows goes to all."""
    for tensor in tensors_in(data):
        if tensor.ndim and tensor.shape[0] != samples:
            raise _no_row_each(tensor, samples, cut)
    if len(shares) > 1:
        _check_rows(data, samples, cut)
    parts, start = [], 0
    for share, device in zip(shares, devices, strict=True):
        rows = slice(start, start + samples_in(share))
        start = rows.stop

        def own(tensor: Tensor, rows: slice = rows, device: torch.device = device) -> Tensor:
            return (tensor[rows] if tensor.ndim else tensor).to(device, non_blocking=True)

        parts.append(map_tensors(own, data))
    return parts


def check_first_batch(task: Task, cut: ShareUse) -> Callable[[], None]:
    """Look whether rows follow samples in the first batch of each size that `collate` makes.

    It is asked for one sample less, too: what has as many rows then is no row for each sample, and
    would be cut where there are as many samples by chance. Returns what undoes this.
    """
    if not task.overrides("collate") or "collate" in vars(task):
        return lambda: None
    collate, seen = task.collate, {1}

    def checked(samples: list[Any]) -> Any:
        found = collate(samples)
        if len(samples) not in seen:
            seen.add(len(samples))
            pairs = zip(tensors_in(found), tensors_in(collate(samples[:-1])), strict=False)
            for tensor, fewer in pairs:
                if tensor.ndim and tensor.shape[0] == fewer.shape[0] == len(samples):
                    raise _no_row_each(tensor, len(samples), cut)
        return found

    def undo() -> None:
        vars(task).pop("collate", None)

    vars(task)["collate"] = checked
    return undo


def _no_row_each(tensor: Tensor, samples: int, cut: ShareUse) -> RequestError:
    return RequestError(
        asked=cut.asked,
        found=f"a tensor of shape {tuple(tensor.shape)} in a batch of {samples} samples",
        why=f"the rows of a batch are cut for {cut.whose}, so there is one for each sample",
        do="let collate give every tensor a row per sample, or use --strategy ddp",
    )


def _check_rows(data: Any, samples: int, cut: ShareUse) -> None:
    """Raise for texts or arrays, one for each sample: only tensors are cut."""
    inside = structure_of(data)
    if inside is not None and not (isinstance(data, (list, tuple)) and _is_text_in(data)):
        for item in inside.items:
            _check_rows(item, samples, cut)
    elif (
        not isinstance(data, (Tensor, str, bytes))
        and getattr(data, "__len__", int)() == samples > 1
    ):
        raise RequestError(
            asked=cut.asked,
            found=f"a {type(data).__name__} with one item for each of {samples} samples",
            why=f"only tensors are cut for {cut.whose}, so each would get all of it",
            do="let collate make tensors of it, or use --strategy ddp",
        )


def _is_text_in(data: Sequence[Any]) -> bool:
    return any(isinstance(item, (str, bytes)) for item in data)


def gathered(
    outputs: list[Any], shares: Sequence[Micro], device: torch.device, cut: ShareUse
) -> Any:
    """The outputs of all shares joined along their rows, on `device`. Autograd goes back."""
    for output, share in zip(outputs, shares, strict=True):
        for tensor in tensors_in(output):
            if not tensor.ndim or tensor.shape[0] % samples_in(share):
                samples = samples_in(share)
                raise RequestError(
                    asked=cut.asked,
                    found=f"an output of shape {tuple(tensor.shape)} for {samples} samples",
                    why=f"the outputs of {cut.whose} are joined along their rows",
                    do="let the model return rows for each sample, or use --strategy ddp",
                )
    if len(outputs) == 1:
        return outputs[0]
    sizes = [samples_in(share) for share in shares]
    moved = [map_tensors(lambda t: t.to(device), output) for output in outputs]
    return _joined(moved, sizes, cut, "the output")


def _joined(values: list[Any], sizes: list[int], cut: ShareUse, place: str) -> Any:
    """What the model returned of all shares as one; raises for what has no rows and differs."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    is_rows = isinstance(first, list) and not any(True for _ in tensors_in(first))
    if is_rows and [len(value) for value in values] == sizes:
        return [item for value in values for item in value]
    inside = [structure_of(value) for value in values]
    names = [found and found.names for found in inside]
    alike = all(type(value) is type(first) for value in values) and names.count(names[0]) == len(
        names
    )
    if not alike or (isinstance(first, PLAIN) and any(value != first for value in values)):
        raise RequestError(
            asked=cut.asked,
            found=f"{place} is {first!r} of one and {_other(values)!r} of another share"[:300],
            why=f"tensors of {cut.whose} are joined along their rows, and lists of one item for "
            "each sample; of the rest there would be that of the first",
            do="let the model return a tensor with a row for each sample, or use --strategy ddp",
        )
    if inside[0] is None:
        return first
    columns = zip(*(found.items for found in inside if found is not None), strict=True)
    return inside[0].build(
        [
            _joined(list(column), sizes, cut, f"{place}{name}")
            for name, column in zip(inside[0].names, columns, strict=True)
        ]
    )


def _other(values: list[Any]) -> Any:
    return next((v for v in values if type(v) is not type(values[0]) or v != values[0]), values[-1])
