"""The global batch of each step, as one rank sees it: its shards, cut into micro-batches.

No communication: the samples of a step, their cut into shards, and the owner of each shard are
arithmetic (`order`, `shards`). A stream is the exception: only reading it shows how much remains,
so the step itself notices the end, and no step waits for a rank whose stream has ended.

`prefetch` batches are made ahead of the step, if threads or processes can make them (`sources`). So
a rank holds that many, and the one that it trains on. With two or more, they are copied to the
device while the device computes.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, tee
from typing import Any

import numpy as np

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.strategies.audits import AUDIT, Draw
from allranks.strategies.shards import Shares, even_sizes
from allranks.torch.data.batch import Batch, Cutting, Leaf, MicroBatch, samples_of, with_data
from allranks.torch.data.copying import Copying
from allranks.torch.data.loaders import SamplerOrder, WholeLoader, endless, rows_between
from allranks.torch.data.sources import (
    COLLATE,
    Ids,
    MapSource,
    Source,
    StreamSource,
    TensorSource,
    drawn_from,
    state_of_rows,
)
from allranks.torch.model.precision import Precision
from allranks.torch.random.keyed_rng import seed_generators
from allranks.training.order import Order, places_after, random_key
from allranks.training.prefetch import one_ahead
from allranks.training.progress import Progress

NO_IDS: Ids = np.empty(0, np.int64)
YIELDS = "let open(shard, epoch, seed, skip) yield samples"
COLLATES_ALONE = (
    "collate draws random numbers, so each shard is collated, and goes through the model, alone: "
    "what is drawn belongs to the shard, whichever rank has it"
)


@dataclass
class GlobalBatches:
    """The batches of a job for one of its readers, cut by `cutting`.

    `precision` places the data; `order` is that of a sampler which came with the data; without one
    the job draws it, unless nothing `shuffles`. `exhausted` is set by the trainer once a step of a
    stream has found no sample on any rank.
    """

    source: Source | StreamSource | WholeLoader
    cutting: Cutting
    batch_size: int
    last_batch: str
    seed: int
    precision: Precision
    prefetch: int = 2
    order: SamplerOrder | None = None
    shuffles: bool = True
    exhausted: bool = False
    collate_draws: bool = False
    audit_every: int = 0

    def __post_init__(self) -> None:
        self._deals, self._dealt_after = 0, Progress()
        self._epoch, self._tried_collate = 0, False
        self._stands, self._states = (0, 0), dict[int, str]()  # of the shards of a stream
        self._rows = dict[int, Iterator[Any]]()
        self._open: weakref.WeakSet[Generator[Batch]] = weakref.WeakSet()
        self.expected_steps = self.steps_per_epoch  # of an epoch, before any was read
        if self.expected_steps == 0:
            assert not isinstance(self.source, (StreamSource, WholeLoader))
            raise RequestError(
                asked="last_batch = drop",
                found=f"{len(self.source)} samples, batch_size = {self.batch_size}",
                why="the only batch of an epoch would be dropped",
                do=f"--set batch_size={len(self.source)}, or --set last_batch=keep",
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch, of this one where they differ; `None` if nobody can know."""
        if isinstance(self.source, StreamSource):
            return None
        if isinstance(self.source, WholeLoader):
            return self.source.steps_per_epoch
        if self.order is not None:
            return self.order.steps.get(self._epoch, self.order.first_guess)
        return self._own_order().steps_per_epoch

    def of_reader(self, rank: int, ranks: int) -> GlobalBatches:
        """The batches of another reader: `rank` of so many `ranks`."""
        return replace(self, cutting=replace(self.cutting, rank=rank, ranks=ranks))

    def steps_by_number(self, strategy: str) -> int:
        """Steps of an epoch whose samples are handed out by their numbers, to one or another.

        Raises `RequestError` for data that is read in one order only.
        """
        by_number = not isinstance(self.source, (StreamSource, WholeLoader)) and self.order is None
        steps = self.steps_per_epoch
        if not by_number or steps is None:
            raise RequestError(
                asked=f"--strategy {strategy}",
                found=f"train_data() of the task: a {type(self.source).__name__}",
                why="samples are handed out by their numbers, and again where a process is lost",
                do="give a data set with samples by number, without a sampler of its own",
            )
        return steps

    def _own_order(self) -> Order:
        assert not isinstance(self.source, (StreamSource, WholeLoader))
        cut = self.batch_size, self.seed, self.last_batch
        return Order(len(self.source), *cut, shuffles=self.shuffles)

    def after(self, done: Progress, epochs: int, steps: int | None) -> Iterator[Batch]:
        """The batches that follow `done`, to the end of `epochs` epochs or of `steps` steps."""
        batches = self._as_dealt(self._following(done, epochs, steps), epochs, steps)
        self._open.add(batches)
        return batches

    def deal(self, shares: Shares, done: Progress) -> None:
        """Let the ranks own these shards in the batches after `done`.

        What was read ahead is read again, by its new owners; a loader that every rank reads whole
        goes on.
        """
        self.cutting = replace(self.cutting, dealt=shares)
        if not isinstance(self.source, WholeLoader):
            self._deals, self._dealt_after = self._deals + 1, done

    def _as_dealt(
        self, batches: Generator[Batch], epochs: int, steps: int | None
    ) -> Generator[Batch]:
        """These batches; once shards are dealt anew, those that follow in their place."""
        while True:
            deals = self._deals
            with closing(batches):
                for batch in batches:
                    yield batch
                    if deals != self._deals:
                        break
                else:
                    return
            batches = self._following(self._dealt_after, epochs, steps)

    def _following(self, done: Progress, epochs: int, steps: int | None) -> Generator[Batch]:
        if isinstance(self.source, StreamSource):
            return self._from_streams(self.source, done, epochs, steps)
        if isinstance(self.source, WholeLoader):
            return self._from_loader(self.source, done, epochs, steps)
        if isinstance(self.source, MapSource) and self.source.has_epochs:
            self.source.enter(self._next_epoch(done))
        return self._by_number(self.source, done, epochs, steps)

    def _next_epoch(self, done: Progress) -> int:
        order = self.order or self._own_order()
        return done.epoch + (done.step_in_epoch >= order.steps_in(done.epoch))

    def close(self) -> None:
        """End what is being read, with the threads and processes that read it."""
        for batches in list(self._open):
            batches.close()

    def _by_number(
        self, source: Source, done: Progress, epochs: int, steps: int | None
    ) -> Generator[Batch]:
        if self._owns_nothing(source):  # who reads ahead would look for its next sample for ever
            for plan in self.plans(done, epochs, steps):
                self._epoch = plan.epoch
                yield self._filled(plan, iter(()))
            return
        for_data, plans = tee(self.plans(done, epochs, steps))  # data is read ahead
        wanted = ((plan.epoch, ids) for plan in for_data for ids in _ids(plan))
        copying = Copying(self.precision)
        with (
            closing(source.batches(wanted, self._micros_ahead, copying.begin)) as data,
            closing(with_data(plans, data)) as begun,
            closing(one_ahead(begun) if self._copies_ahead else begun) as ready,
        ):
            for plan, parts in ready:
                self._epoch = plan.epoch
                yield self._filled(plan, iter([copying.finish(part) for part in parts]))

    def _owns_nothing(self, source: Source) -> bool:
        """Whether no sample of any batch is this reader's: there are more readers than samples."""
        if self.order is not None or self.audit_every:
            return False
        sizes, _, rows = self.cutting.cut(min(self.batch_size, len(source)))
        return not rows and self.cutting.spare(sizes) is None

    @property
    def _copies_ahead(self) -> bool:
        """Whether a thread of its own brings the next batch to a device, where nothing else does.

        Not where this thread reads, as what is drawn there is keyed, nor where a sampler is drawn.
        """
        source = self.source
        if not accelerator.is_accelerator(self.precision.device):
            return False
        if self.prefetch < 2 or self.order is not None:
            return False
        if isinstance(source, MapSource):
            return source.workers > 0 and not source.is_staged
        return isinstance(source, TensorSource)

    @property
    def _micros_ahead(self) -> int:
        """The micro-batches that the source makes ahead; with later ones, `prefetch` batches.

        The step waits for the last micro-batch of a batch, while its others are stored here.
        """
        return (self.prefetch - 1) * self._micros_per_batch + (not self._copies_ahead)

    @property
    def _micros_per_batch(self) -> int:
        full = self.cutting.leaves(even_sizes(self.batch_size, self.cutting.shards))
        return max(1, sum(len(leaf.micros) for leaf in full))

    @property
    def note(self) -> str:
        """A note if more is read ahead than requested; else empty."""
        per_batch, source = self._micros_per_batch, self.source
        if not isinstance(source, MapSource):
            return ""
        ahead = source.made_ahead(self._micros_ahead) + per_batch * self._copies_ahead
        if ahead <= self.prefetch * per_batch:
            return ""
        unit = "batches" if per_batch == 1 else "micro-batches"
        return (
            f"{source.workers} loader processes make a batch each: {ahead} {unit} are read ahead, "
            f"not --prefetch {self.prefetch}"
        )

    def plans(self, done: Progress, epochs: int, steps: int | None) -> Iterator[Batch]:
        """The batches without their data: arithmetic only, except for draws of a sampler."""
        order = self.order or self._own_order()
        for index, epoch, step in places_after(done, epochs, steps, order.steps_in):
            chosen = order.batch(epoch, step)
            sizes, first, rows = self.cutting.cut(len(chosen))
            own_ids = chosen[first : first + rows]
            if (spare := self.cutting.spare(sizes)) is not None:
                spare = replace(spare, data=chosen[: spare.samples])
            where = index, epoch, step, len(chosen), sizes
            draw = self._draw(index, sizes)
            if draw is None:
                passes = self.cutting.passes(sizes)
                yield Batch(*where, self.cutting.leaves(sizes), own_ids, passes, spare)
                continue
            audited = self.cutting.audited(draw, sizes, chosen)
            leaves = self.cutting.leaves(sizes, draw.shard)
            passes = self.cutting.passes(sizes, draw.shard)
            if (
                draw.owner == self.cutting.rank and not self.cutting.shard_alone
            ):  # its passes come first
                start = sum(sizes[: draw.shard]) - first
                inside = slice(start, start + len(audited.ids))
                own_ids = np.concatenate([audited.ids, np.delete(own_ids, inside)])
            yield Batch(*where, leaves, own_ids, passes, spare, audited)

    def _draw(self, index: int, sizes: tuple[int, ...]) -> Draw | None:
        """The shard that is audited in global batch `index`, if one is; the same on all ranks."""
        if not self.audit_every or (index + 1) % self.audit_every:
            return None
        return self.cutting.draw(random_key(self.seed, index, AUDIT), sizes)

    def _filled(self, plan: Batch, data: Iterator[Any]) -> Batch:
        """The batch with its data, which is read in order."""
        leaves = []
        for leaf in plan.leaves:
            micros = [MicroBatch(m.pieces, m.samples, next(data)) for m in leaf.micros]
            leaves.append(Leaf(leaf.shards, tuple(micros)))
        spare = plan.spare and replace(plan.spare, data=next(data))
        if plan.audited is not None and plan.audited.is_read:
            plan = replace(plan, audited=plan.audited.with_data(data))
        return plan.with_data(tuple(leaves), spare)

    def _from_loader(
        self, source: WholeLoader, done: Progress, epochs: int, steps: int | None
    ) -> Generator[Batch]:
        epoch, step, index = done.epoch, done.step_in_epoch, done.batch_index
        copying = Copying(self.precision)
        while epoch < epochs:
            for whole, samples in source.open(epoch, step):
                if steps is not None and index >= steps:
                    return
                sizes, row, _ = self.cutting.cut(samples)
                leaves, passes = self.cutting.leaves(sizes), self.cutting.passes(sizes)
                spare = self.cutting.spare(sizes)
                plan = Batch(index, epoch, step, samples, sizes, leaves, NO_IDS, passes, spare)
                parts = []
                for micro in plan.micros:
                    parts.append(rows_between(whole, row, row + micro.samples, samples))
                    row += micro.samples
                if spare is not None:
                    parts.append(rows_between(whole, 0, spare.samples, samples))
                yield self._filled(plan, map(copying.now, parts))
                step, index = step + 1, index + 1
            if step == 0:
                raise endless(epoch, "a DataLoader", "let it give batches")
            epoch, step = epoch + 1, 0

    def _from_streams(
        self, source: StreamSource, done: Progress, epochs: int, steps: int | None
    ) -> Generator[Batch]:
        quota, copying = even_sizes(self.batch_size, self.cutting.shards), Copying(self.precision)
        epoch, step, index = done.epoch, done.step_in_epoch, done.batch_index
        last: MicroBatch | None = None
        while epoch < epochs:
            at = {k: step * quota[k] for k in self.cutting.owned}
            states = self.states_of_shards(epoch, step)
            rows = {k: source.rows(k, epoch, n, states.get(k, "")) for k, n in at.items()}
            streams = {k: source.samples(rows[k], k, epoch, n) for k, n in at.items()}
            self.exhausted = False
            while not self.exhausted:
                if steps is not None and index >= steps:
                    return
                read = {}
                for k, stream in streams.items():  # its randomness belongs to the shard and step
                    seed_generators(random_key(self.seed, epoch, k, step))
                    read[k] = list(islice(stream, quota[k]))
                self._stands, self._rows = (epoch, step + 1), rows
                sizes = tuple(len(read.get(k, ())) for k in range(self.cutting.shards))
                leaves = self.cutting.leaves(sizes)
                plan = Batch(index, epoch, step, self.batch_size, None, leaves, NO_IDS)
                if plan.micros and self._collating_draws(source, plan, plan.micros[0], read):
                    plan = replace(plan, leaves=self.cutting.leaves(sizes))
                collated = (self._collated(source, plan, micro, read) for micro in plan.micros)
                batch = self._filled(plan, map(copying.now, collated))
                if self.cutting.counts_passes:
                    last = batch.micros[-1] if batch.micros else last or self._spare(source, plan)
                    passes, spare = self.cutting.passes(quota), None if batch.micros else last
                    batch = replace(batch, passes=passes, spare=spare)
                yield batch
                step, index = step + 1, index + 1
            if step == 1:
                raise endless(epoch, "a stream", YIELDS)
            epoch, step, index = epoch + 1, 0, index - 1

    def states_of_shards(self, epoch: int, step: int) -> dict[int, str]:
        """The states of this rank's streams, as JSON by shard; {} if more steps are read."""
        if self._stands != (epoch, step):
            return {}
        if not self._rows:
            return {k: self._states[k] for k in self.cutting.owned if k in self._states}
        states = {k: state_of_rows(rows) for k, rows in self._rows.items()}
        return {k: state for k, state in states.items() if state}

    def load_states_of_shards(self, epoch: int, step: int, states: dict[int, str]) -> None:
        """Go on where all ranks together were after `step` steps, once `after` is called."""
        self._stands, self._states, self._rows = (epoch, step), states, {}

    def _spare(self, source: StreamSource, plan: Batch) -> MicroBatch:
        """The micro-batch of a rank that has read no sample yet: the first samples of its stream,
        or of another rank's."""
        quota = even_sizes(self.batch_size, self.cutting.shards)
        for k in (*self.cutting.owned, *range(self.cutting.shards)):
            seed_generators(random_key(self.seed, plan.epoch, k, 0))
            rows = source.rows(k, plan.epoch, 0)
            read = list(islice(source.samples(rows, k, plan.epoch, 0), quota[k]))
            if read:
                micro = self.cutting.first_of({k: len(read)})
                self._collating_draws(source, plan, micro, {k: read})
                data = self._collated(source, plan, micro, {k: read})
                return replace(micro, data=self.precision.to_device(data))
        raise endless(plan.epoch, "a stream", YIELDS)

    def _key_collate(self, plan: Batch, micro: MicroBatch) -> None:
        """Key the draws of collate to the first piece of its micro-batch."""
        first = micro.pieces[0]
        step = plan.step_in_epoch
        seed_generators(random_key(self.seed, plan.epoch, first.shard, step, first.start, COLLATE))

    def _collated(
        self, source: StreamSource, plan: Batch, micro: MicroBatch, read: dict[int, list[Any]]
    ) -> Any:
        self._key_collate(plan, micro)
        return source.collate(samples_of(micro.pieces, read))

    def _collating_draws(
        self, source: StreamSource, plan: Batch, micro: MicroBatch, read: dict[int, list[Any]]
    ) -> bool:
        """Whether collate turns out to draw random numbers: from then on shards collate alone.

        Samples of a stream must be read first, so this is tried in the first step that has any.
        """
        if self._tried_collate or self.cutting.collates_alone:
            return False
        self._tried_collate = True
        self._key_collate(plan, micro)
        before = drawn_from()
        source.collate(samples_of(micro.pieces, read))
        draws = drawn_from() != before
        if draws:
            self.cutting.begin_collating_alone()
            if not self.cutting.shard_alone and self.cutting.micro_batch != 1:
                warnings.warn(COLLATES_ALONE, stacklevel=1)
        return draws


def _ids(plan: Batch) -> Iterator[Ids]:
    """The sample numbers of the micro-batches to read for a batch, in order."""
    start = 0
    for micro in plan.micros:
        yield plan.ids[start : start + micro.samples]
        start += micro.samples
    if plan.spare is not None:
        yield plan.spare.data  # until it is read
    if plan.audited is not None and plan.audited.is_read:
        yield from plan.audited.to_read()
