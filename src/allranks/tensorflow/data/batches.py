"""The global batch of each step, as one process sees it: a part for each of its replicas.

Which samples a step uses, how they are cut into shards, and which replica owns which shard are
arithmetic (`order`, `shards`), so nobody communicates. A `tf.data.Dataset` has an order of its own:
every process reads all of it and takes its own rows.

    arrays               rows are taken by number, where they are needed: a thread would take
                         Python's lock in the midst of the step, which costs more than the rows
    samples by number    read and augmented in threads, `prefetch` batches ahead (`stages`)
    tf.data.Dataset      made anew for each epoch with its random numbers keyed; reads ahead itself

What has to be read is: `prefetch` batches, so a process holds that many and the one in use.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, tee
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import Micro, even_sizes, micro_batches, owned_shards
from allranks.tensorflow.data.nested import arrays_in, joined, mapped
from allranks.tensorflow.data.tf_dataset import WholeDataset
from allranks.tensorflow.step.inputs import InputSplit
from allranks.tensorflow.strategies.base import TensorFlowStrategy
from allranks.training.keras_task import Task
from allranks.training.order import Epochs, Order, places_after, random_key
from allranks.training.prefetch import staged
from allranks.training.progress import Progress

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class ReplicaBatch:
    """This process's part of the global batch of one step.

    `sizes` are the samples of every shard of the job; `cut` says which pieces each own replica has
    in which micro-batch; `ids` are the own samples in the data set, in order (none of a
    `tf.data.Dataset`); `parts` the data of each own replica, one structure for each micro-batch.
    """

    index: int
    epoch: int
    step_in_epoch: int
    sizes: tuple[int, ...]
    cut: InputSplit
    ids: Ids
    parts: list[list[Any]] = field(default_factory=list)
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of one sample of a `tf.data.Dataset`, which may pad each batch to another length."""

    @property
    def nominal(self) -> int:
        """The samples of the whole global batch."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Arrays:
    """Arrays in memory, alike in length."""

    arrays: Any

    def __len__(self) -> int:
        return len(next(arrays_in(self.arrays)))

    def __getitem__(self, number: int) -> Any:
        return mapped(lambda array: array[number], self.arrays)

    def rows(self, ids: Ids) -> Any:
        return mapped(lambda array: array[ids], self.arrays)


@dataclass(frozen=True)
class Samples:
    """Samples by number; with `augments` the task changes each one when it is read."""

    samples: Any
    augments: bool = False

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self, ids: Ids) -> Any:
        return collated([self.samples[int(number)] for number in ids])


Source = Arrays | Samples | WholeDataset


def collated(samples: Sequence[Any]) -> Any:
    """A batch of samples that are alike: their arrays stacked along a new first axis."""
    return joined(np.stack, [mapped(np.asarray, sample) for sample in samples])


class Batches:
    """The batches of a job for the replicas of this process, out of `source`.

    With `cut_for` of the job one replica cuts its batches as that many would.
    """

    def __init__(self, source: Source, task: Task, job: Job, strategy: TensorFlowStrategy) -> None:
        self.source, self.task, self.job = source, task, job
        self.replicas, self.local_replicas = strategy.replicas, strategy.local_replicas
        self._open: list[Generator[ReplicaBatch]] = []
        self._cuts: dict[tuple[int, ...], InputSplit] = {}
        runs = [owned_shards(self.task.shards, self.replicas, n) for n in self.local_replicas]
        self._mine = range(runs[0].start, runs[-1].stop)
        self.expected_steps = self.steps_per_epoch  # of an epoch, before any was read
        if self.expected_steps == 0:
            raise RequestError(
                asked="last_batch = drop",
                found=f"fewer than batch_size = {self.task.batch_size} samples",
                why="the only batch of an epoch would be dropped",
                do="a smaller --set batch_size, or --set last_batch=keep",
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; `None` while that is unknown."""
        if isinstance(self.source, WholeDataset):
            return self.source.steps_per_epoch
        return self._order(self.source).steps_per_epoch

    def _order(self, source: Arrays | Samples) -> Order:
        return Order(len(source), self.task.batch_size, self.job.seed, self.task.last_batch)

    def after(self, done: Progress, epochs: int, steps: int | None) -> Iterator[ReplicaBatch]:
        """The batches that follow `done`, to the end of `epochs` epochs or of `steps` steps."""
        if isinstance(self.source, WholeDataset):
            batches = self._whole(self.source, done, epochs, steps)
        else:
            batches = self._by_number(self.source, done, epochs, steps)
        self._open.append(batches)
        return batches

    def close(self) -> None:
        """Close all open iterators, with the threads that read for them."""
        for batches in self._open:
            batches.close()
        self._open.clear()

    # --- by number ------------------------------------------------------------------------

    def _by_number(
        self, source: Arrays | Samples, done: Progress, epochs: int, steps: int | None
    ) -> Generator[ReplicaBatch]:
        plans, for_data = tee(self._plans(self._order(source), done, epochs, steps))
        with closing(self._data(source, for_data)) as data:
            for plan, parts in zip(plans, data, strict=True):
                plan.parts[:] = parts
                yield plan

    def _plans(
        self, order: Order, done: Progress, epochs: int, steps: int | None
    ) -> Iterator[ReplicaBatch]:
        """The batches without their data: arithmetic only."""
        for index, epoch, step in places_after(done, epochs, steps, order.steps_in):
            samples = order.batch(epoch, step)
            sizes = even_sizes(len(samples), self.task.shards)
            start, stop = self._span(sizes)
            yield ReplicaBatch(index, epoch, step, sizes, self.cut(sizes), samples[start:stop])

    def _span(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        """The range of this process's samples in a batch: its shards are contiguous."""
        start = sum(sizes[: self._mine.start])
        return start, start + sum(sizes[self._mine.start : self._mine.stop])

    def cut(self, sizes: tuple[int, ...]) -> InputSplit:
        """How a batch with shards of these sizes is divided among the replicas."""
        if sizes not in self._cuts:
            everywhere = [self._micros(sizes, replica) for replica in range(self.replicas)]
            most = max(map(len, everywhere))
            padded = [micros + ((),) * (most - len(micros)) for micros in everywhere]
            spare = not all(any(micros) for micros in everywhere)
            pieces = tuple(padded[replica] for replica in self.local_replicas)
            self._cuts[sizes] = InputSplit(pieces, spare)
        return self._cuts[sizes]

    def _micros(self, sizes: tuple[int, ...], replica: int) -> tuple[Micro, ...]:
        """The micro-batches of a replica; with `cut_for`, those of that many replicas."""
        shards, ranks = self.task.shards, self.job.cut_for
        spans = [owned_shards(shards, self.replicas, replica)]
        if ranks:
            spans = [owned_shards(shards, ranks, n) for n in range(ranks)]
        parts = ({shard: sizes[shard] for shard in span} for span in spans)
        size = self.job.micro_batch
        return tuple(micro for part in parts for micro in micro_batches(part, size))

    def _data(
        self, source: Arrays | Samples, plans: Iterator[ReplicaBatch]
    ) -> Generator[list[list[Any]]]:
        if isinstance(source, Arrays):
            yield from (split(source.rows(p.ids), p.cut) for p in plans)
        else:
            epochs = Epochs(source.samples)
            if not epochs:
                yield from self._sampled(source, plans)
                return
            for epoch, of_epoch in groupby(plans, key=lambda plan: plan.epoch):
                epochs.enter(epoch, lambda: None)  # threads share them: the last epoch is over
                yield from self._sampled(source, of_epoch)

    def _sampled(
        self, source: Samples, plans: Iterator[ReplicaBatch]
    ) -> Generator[list[list[Any]]]:
        """Read and transform each sample in a thread; a batch's plan is its last key."""

        def read(key: Any) -> Any:
            return key if isinstance(key, ReplicaBatch) else source.samples[key[1]]

        def decode(key: Any, raw: Any) -> Any:
            if isinstance(key, ReplicaBatch) or not source.augments:
                return raw
            keyed = np.random.Philox(key=random_key(self.job.seed, *key))
            return self.task.augment(raw, np.random.Generator(keyed))

        def collate(samples: list[Any]) -> list[list[Any]]:
            *rows, plan = samples
            # a process without samples still hands its replicas an array of the right kind
            whole = (
                collated(rows)
                if rows
                else mapped(lambda a: a[:0], source.rows(np.zeros(1, np.int64)))
            )
            return split(whole, plan.cut)

        yield from staged(
            ([*((plan.epoch, int(n)) for n in plan.ids), plan] for plan in plans),
            read,
            decode,
            collate,
            threads=max(1, self.job.loader_workers),
            ahead=self.job.prefetch,
        )

    # --- a tf.data.Dataset ----------------------------------------------------------------

    def _whole(
        self, source: WholeDataset, done: Progress, epochs: int, steps: int | None
    ) -> Generator[ReplicaBatch]:
        epoch, step, index = done.epoch, done.step_in_epoch, done.batch_index
        while epoch < epochs and (steps is None or index < steps):
            for whole, rows in source.open(epoch, skip=step):
                sizes = even_sizes(rows, self.task.shards)
                cut = self.cut(sizes)
                parts = split(_rows_of(whole, *self._span(sizes)), cut)
                shapes = tuple(tuple(array.shape[1:]) for array in arrays_in(whole))
                yield ReplicaBatch(
                    index, epoch, step, sizes, cut, np.empty(0, np.int64), parts, shapes
                )
                step, index = step + 1, index + 1
                if steps is not None and index >= steps:
                    return
            epoch, step = epoch + 1, 0


def split(rows: Any, cut: InputSplit) -> list[list[Any]]:
    """Cut the rows of a process for each replica and micro-batch, as tensors on the host."""
    at, parts = 0, list[list[Any]]()
    for micros in cut.pieces:
        parts.append([])
        for micro in micros:
            size = sum(piece.samples for piece in micro)
            parts[-1].append(mapped(on_host, _rows_of(rows, at, at + size)))
            at += size
    return parts


def on_host(array: Any) -> Any:
    """An array as a tensor in the memory of the host: each replica takes its part from there."""
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def _rows_of(batch: Any, start: int, stop: int) -> Any:
    return mapped(lambda array: array[start:stop], batch)
