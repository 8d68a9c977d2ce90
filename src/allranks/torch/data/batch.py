"""One rank's part of a global batch: its leaves and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.audits import Draw
from allranks.strategies.shards import (
    Micro,
    Piece,
    Shares,
    even_sizes,
    micro_batches,
    owned_shards,
)
from allranks.torch.data.collate import copied, map_tensors, structure_of, tensors_in
from allranks.torch.data.copying import AsyncCopy
from allranks.torch.data.loaders import rows_between
from allranks.torch.data.sources import Ids
from allranks.torch.task import Task


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass: pieces of shards, and their collated data."""

    pieces: Micro
    samples: int
    data: Any = field(default=None, repr=False)  # a debugger prints a batch


@dataclass(frozen=True)
class Leaf:
    """Shards whose gradients add up before anything is exchanged, with their micro-batches."""

    shards: range
    micros: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Audited:
    """The shard of a batch that another rank computes again, too (`--audit`).

    `ids` are the numbers of its samples; `micros` its passes, with data on the auditor alone.
    """

    draw: Draw
    ids: Ids
    micros: tuple[MicroBatch, ...]
    is_read: bool

    def to_read(self) -> Iterator[Ids]:
        """The sample numbers of each pass."""
        start = 0
        for micro in self.micros:
            yield self.ids[start : start + micro.samples]
            start += micro.samples

    def with_data(self, data: Iterator[Any]) -> Audited:
        """The same with the data of its passes."""
        return replace(self, micros=tuple(replace(m, data=next(data)) for m in self.micros))


@dataclass(frozen=True)
class Batch:
    """One rank's part of the global batch of one step.

    `nominal`, in samples, divides gradients before they are exchanged. `sizes` are the samples of
    every shard of the job, or `None` if only a stream knows. `ids` are the numbers of this rank's
    samples in the data set, in order (none for a stream). Every rank runs `passes` forward passes,
    with samples of no weight if it has too few micro-batches (0: one for each micro-batch). `spare`
    is the micro-batch of a rank without a sample, if it must run one; it is not trained on. Of an
    `audited` batch another rank computes a shard again.
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
    audited: Audited | None = None

    @property
    def micros(self) -> list[MicroBatch]:
        """The micro-batches of this rank, in order; `data` of each is as collated."""
        return [micro for leaf in self.leaves for micro in leaf.micros]

    @property
    def to_read(self) -> list[MicroBatch]:
        """The micro-batches whose data is read: those of this rank, and the `spare` one.

        On the auditor also those of an audited shard.
        """
        micros = self.micros if self.spare is None else [*self.micros, self.spare]
        audited = self.audited
        return micros if audited is None or not audited.is_read else [*micros, *audited.micros]

    @property
    def passes_without_weight(self) -> int:
        """The number of passes that this rank runs only for the others."""
        return max(0, self.passes - len(self.micros))

    def with_data(self, leaves: tuple[Leaf, ...], spare: MicroBatch | None) -> Batch:
        """The same with its data. Called in every step: `dataclasses.replace` is half as fast."""
        where = self.index, self.epoch, self.step_in_epoch, self.nominal, self.sizes
        return Batch(*where, leaves, self.ids, self.passes, spare, self.audited)

    @property
    def own_samples(self) -> int:
        """The samples of this rank; those of all ranks are in the `StepResult`."""
        return sum(micro.samples for micro in self.micros)


def micro_for_others(batch: Batch, most: int | None = None) -> MicroBatch:
    """The micro-batch that a rank runs for the others; of it the first `most` samples, if given."""
    micro = batch.micros[-1] if batch.micros else batch.spare
    assert micro is not None, "the data gives a rank without a sample a spare one"
    first = micro.pieces[0]
    if most is None or micro.samples <= most:
        return micro
    samples = min(first.samples, most)
    try:
        data = rows_between(micro.data, 0, samples, micro.samples)
    except RequestError:  # no rows to choose from
        return micro
    return MicroBatch(
        (Piece(first.shard, first.start, first.start + samples, samples),), samples, data
    )


def copy_of(micro: MicroBatch) -> MicroBatch:
    """The same with a copy of its data; where that cannot be copied, as it is."""
    try:
        return replace(micro, data=copied(micro.data))
    except RequestError:
        return micro


def samples_of(pieces: Micro, read: dict[int, list[Any]]) -> list[Any]:
    """The samples of these pieces, in order, from the samples that were read of each shard."""
    return [s for piece in pieces for s in read[piece.shard][piece.start : piece.stop]]


def with_data(
    plans: Iterator[Batch], data: Iterator[AsyncCopy]
) -> Generator[tuple[Batch, list[AsyncCopy]]]:
    """Each batch of `plans` with the running copies of its data."""
    for plan in plans:
        yield plan, [next(data) for _ in plan.to_read]


# --- cutting -------------------------------------------------------------------------------------
# How a global batch is cut into leaves and micro-batches of each rank. Arithmetic, without data.
#
# A rank without a sample may still have to run the model: because passes communicate, or because
# outputs of all ranks are joined, and it must know their form. It then uses the first samples of
# the same global batch (`spare`), which another rank trains on. So no step depends on an earlier
# one, and if those samples are not finite, neither is the step. For a stream, no rank knows the
# samples of others, so it uses those that it has read last.


Sizes = tuple[int, ...]
"""The samples of every shard of a global batch."""


@dataclass
class Cutting:
    """Cuts the global batches of a job for the reader `rank` of `ranks`.

    `shard_alone` makes every shard a leaf, `collates_alone` a micro-batch; `cut_for` cuts
    micro-batches as so many ranks would. With `counts_passes`, batches have the largest number of
    passes of a rank; with `needs_spare`, a rank without a sample gets a spare one. The ranks own
    the shards of `dealt`, or else even shares.
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
    dealt: Shares | None = None
    _cuts: dict[int, tuple[Sizes, int, int]] = field(default_factory=dict, init=False)
    _leaves: dict[tuple[Sizes, int | None], tuple[Leaf, ...]] = field(
        default_factory=dict, init=False
    )
    _passes: dict[tuple[Sizes, int | None], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._runs = (self.dealt or Shares.even(self.shards, self.ranks)).runs
        self.owned = self._runs[self.rank]

    def begin_collating_alone(self) -> None:
        """From now on every shard is a micro-batch."""
        self.collates_alone = True
        self._leaves.clear()
        self._passes.clear()

    def cut(self, samples: int) -> tuple[Sizes, int, int]:
        """The sizes of all shards of a batch; its first sample on this rank, and how many."""
        if samples not in self._cuts:
            sizes = even_sizes(samples, self.shards)
            local = sum(sizes[k] for k in self.owned)
            self._cuts[samples] = sizes, sum(sizes[: self.owned.start]), local
        return self._cuts[samples]

    def leaves(self, sizes: Sizes, audited: int | None = None) -> tuple[Leaf, ...]:
        """The leaves of this rank for shards of these sizes, data still missing.

        The passes of an `audited` shard are the first ones of its leaf, and have no other shard.
        """
        key = sizes, audited if audited in self.owned else None
        if key not in self._leaves:
            self._leaves[key] = self._leaves_for(sizes, self.owned, audited)
        return self._leaves[key]

    def passes(self, sizes: Sizes, audited: int | None = None) -> int:
        """The largest number of micro-batches of a rank; 0 unless passes are counted."""
        if not self.counts_passes:
            return 0
        if (key := (sizes, audited)) not in self._passes:
            each = (self._leaves_for(sizes, span, audited) for span in self._runs)
            self._passes[key] = max(sum(len(leaf.micros) for leaf in leaves) for leaves in each)
        return self._passes[key]

    def audited(self, draw: Draw, sizes: Sizes, chosen: Ids) -> Audited:
        """The passes of the shard that was drawn, of a batch with the samples `chosen`."""
        start, size = sum(sizes[: draw.shard]), sizes[draw.shard]
        micros = tuple(
            MicroBatch(micro, sum(piece.samples for piece in micro))
            for micro in micro_batches({draw.shard: size}, self.micro_batch)
        )
        return Audited(draw, chosen[start : start + size], micros, self.rank == draw.auditor)

    def draw(self, key: int, sizes: Sizes) -> Draw | None:
        """The draw of a random `key`; `None` where there is no other rank."""
        return Draw.of(key, sizes, self._runs)

    def spare(self, sizes: Sizes) -> MicroBatch | None:
        """The micro-batch of this rank if it has no sample: the first samples of the batch.

        `None` if it has samples, or needs none.
        """
        if not self.needs_spare or any(leaf.micros for leaf in self.leaves(sizes)):
            return None
        return self.first_of(dict(enumerate(sizes)))

    def first_of(self, sizes: dict[int, int]) -> MicroBatch:
        """The first micro-batch of shards of these sizes."""
        first = next(shard for shard, size in sizes.items() if size)
        micro = micro_batches({first: sizes[first]}, self.micro_batch)[0]
        return MicroBatch(micro, sum(piece.samples for piece in micro))

    def _leaves_for(
        self, sizes: Sizes, owned_by_it: range, audited: int | None = None
    ) -> tuple[Leaf, ...]:
        owned = {shard: sizes[shard] for shard in owned_by_it}
        groups = [{k: size} for k, size in owned.items()] if self.shard_alone else [owned]
        return tuple(
            Leaf(
                range(min(group), max(group) + 1),
                tuple(
                    MicroBatch(m, sum(piece.samples for piece in m))
                    for part in self._parts(group, audited)
                    for m in self._micros_of(part)
                ),
            )
            for group in groups
        )

    def _micros_of(self, group: dict[int, int]) -> tuple[Micro, ...]:
        """The micro-batches of these shards.

        If shards are collated alone, none is shared: random draws in `collate` belong to a shard.
        """
        if not self.collates_alone:
            return micro_batches(group, self.micro_batch)
        alone = (micro_batches({k: size}, self.micro_batch) for k, size in group.items())
        return tuple(micro for micros in alone for micro in micros)

    def _parts(self, group: dict[int, int], audited: int | None) -> list[dict[int, int]]:
        """The shards in groups that no micro-batch may cross: one for each of `cut_for` ranks.

        An `audited` shard is a group, the first one.
        """
        if audited in group:
            others = {k: size for k, size in group.items() if k != audited}
            return [{audited: group[audited]}, *([others] if others else [])]
        if not self.cut_for:
            return [group]
        spans = [owned_shards(self.shards, self.cut_for, rank) for rank in range(self.cut_for)]
        return [{k: group[k] for k in span if k in group} for span in spans]


# --- shares --------------------------------------------------------------------------------------
# Cuts a micro-batch into shares of whole pieces, and joins their outputs again.
#
# Used if several passes make up a micro-batch: replicas on devices, pieces in flight.


PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class ShareUse:
    """The words of its errors: the option that cuts a batch, and the owners of the shares."""

    option: str
    whose: str


def shares_of(pieces: Micro, most: int) -> list[Micro]:
    """Cut a micro-batch into at most `most` shares of whole pieces, in order, as even as possible.

    Fewer pieces than `most` leave the last ones without a share.
    """
    spans = [owned_shards(len(pieces), most, number) for number in range(most)]
    return [pieces[span.start : span.stop] for span in spans if span]


def samples_in(pieces: Micro) -> int:
    return sum(piece.samples for piece in pieces)


def scattered(
    data: Any, samples: int, shares: Sequence[Micro], devices: Sequence[torch.device], cut: ShareUse
) -> list[Any]:
    """The rows of each share, on its device; scalars go to all."""
    for tensor in tensors_in(data):
        if tensor.ndim and tensor.shape[0] != samples:
            raise _no_row_each(tensor, samples, cut)
    if len(shares) > 1:
        _check_rows(data, samples, cut)
    parts, start = [], 0
    for share, device in zip(shares, devices, strict=True):
        rows = slice(start, start + samples_in(share))
        start = rows.stop

        def rows_on(tensor: Tensor, rows: slice = rows, device: torch.device = device) -> Tensor:
            return (tensor[rows] if tensor.ndim else tensor).to(device, non_blocking=True)

        parts.append(map_tensors(rows_on, data))
    return parts


def check_first_batch(task: Task, cut: ShareUse) -> Callable[[], None]:
    """Check that `collate` makes one row for each sample, in its first batch of each size.

    `collate` also runs with one sample less. A tensor that then has as many rows has no row for
    each sample, and would be cut wrongly. Returns a function that undoes this.
    """
    if not task.overrides("collate") or "collate" in vars(task):
        return lambda: None
    collate, checked_sizes = task.collate, {1}

    def checked(samples: list[Any]) -> Any:
        batch = collate(samples)
        if len(samples) not in checked_sizes:
            checked_sizes.add(len(samples))
            pairs = zip(tensors_in(batch), tensors_in(collate(samples[:-1])), strict=False)
            for tensor, fewer in pairs:
                if tensor.ndim and tensor.shape[0] == fewer.shape[0] == len(samples):
                    raise _no_row_each(tensor, len(samples), cut)
        return batch

    def undo() -> None:
        vars(task).pop("collate", None)

    vars(task)["collate"] = checked
    return undo


def _no_row_each(tensor: Tensor, samples: int, cut: ShareUse) -> RequestError:
    return RequestError(
        asked=cut.option,
        found=f"a tensor of shape {tuple(tensor.shape)} in a batch of {samples} samples",
        why=f"the rows of a batch are cut for {cut.whose}, so there is one for each sample",
        do="let collate give every tensor a row per sample, or use --strategy ddp",
    )


def _check_rows(data: Any, samples: int, cut: ShareUse) -> None:
    """Raise for lists of texts or arrays, one for each sample: only tensors are cut."""
    inside = structure_of(data)
    if inside is not None and not (isinstance(data, (list, tuple)) and _is_text_in(data)):
        for item in inside.items:
            _check_rows(item, samples, cut)
    elif (
        not isinstance(data, (Tensor, str, bytes))
        and getattr(data, "__len__", int)() == samples > 1
    ):
        raise RequestError(
            asked=cut.option,
            found=f"a {type(data).__name__} with one item for each of {samples} samples",
            why=f"only tensors are cut for {cut.whose}, so each would get all of it",
            do="let collate make tensors of it, or use --strategy ddp",
        )


def _is_text_in(data: Sequence[Any]) -> bool:
    return any(isinstance(item, (str, bytes)) for item in data)


def gathered(
    outputs: list[Any], shares: Sequence[Micro], device: torch.device, cut: ShareUse
) -> Any:
    """Join the outputs of all shares along their rows, on `device`, differentiably."""
    for output, share in zip(outputs, shares, strict=True):
        for tensor in tensors_in(output):
            if not tensor.ndim or tensor.shape[0] % samples_in(share):
                samples = samples_in(share)
                raise RequestError(
                    asked=cut.option,
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
    """Join the outputs of all shares; raises for values without rows that differ."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    is_rows = isinstance(first, list) and not any(True for _ in tensors_in(first))
    if is_rows and [len(value) for value in values] == sizes:
        return [item for value in values for item in value]
    inside = [structure_of(value) for value in values]
    names = [structure and structure.names for structure in inside]
    alike = all(type(value) is type(first) for value in values) and names.count(names[0]) == len(
        names
    )
    if not alike or (isinstance(first, PLAIN) and any(value != first for value in values)):
        raise RequestError(
            asked=cut.option,
            found=f"{place} is {first!r} of one and {_other(values)!r} of another share"[:300],
            why=f"tensors of {cut.whose} are joined along their rows, and lists of one item for "
            "each sample; of the rest there would be that of the first",
            do="let the model return a tensor with a row for each sample, or use --strategy ddp",
        )
    if inside[0] is None:
        return first
    columns = zip(*(each.items for each in inside if each is not None), strict=True)
    return inside[0].build(
        [
            _joined(list(column), sizes, cut, f"{place}{name}")
            for name, column in zip(inside[0].names, columns, strict=True)
        ]
    )


def _other(values: list[Any]) -> Any:
    return next((v for v in values if type(v) is not type(values[0]) or v != values[0]), values[-1])
