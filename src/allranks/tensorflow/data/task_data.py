"""The data of a task: opened when it is first needed, cut for this rank, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import largest_shard
from allranks.tensorflow.data.batches import Arrays, Batches, Samples
from allranks.tensorflow.data.evaluate import Evaluator
from allranks.tensorflow.data.nested import arrays_in
from allranks.tensorflow.data.open_data import Source, open_data
from allranks.tensorflow.data.tf_dataset import WholeDataset
from allranks.tensorflow.strategies.base import Strategy
from allranks.training.evaluation_plan import check_metrics
from allranks.training.keras_task import Task
from allranks.training.same_data import (
    check_same,
    digest_of,
    identity,
    rows_to_compare,
    samples_to_compare,
)


def on_host(array: Any) -> Any:
    """An array as a tensor in the memory of the host: each replica takes its part from there."""
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


class TaskData:
    """What one rank reads for one task under one strategy: its batches, and its evaluation data."""

    def __init__(self, task: Task, job: Job, strategy: Strategy, model: Any) -> None:
        self.task, self.job, self.strategy, self.model = task, job, strategy, model
        self.notes: list[str] = []
        self._batches: Batches | None = None
        self._compared = False
        self._eval_source: Source | None = None
        self._evaluator = Evaluator(
            task, model, strategy, largest_shard(task.batch_size, task.shards)
        )

    @property
    def batches(self) -> Batches:
        """The global batches of the training, opened when they are first needed."""
        if self._batches is None:
            source = open_data(self.task, "train_data", self.model, self.job.seed)
            assert source is not None
            if isinstance(source, WholeDataset):
                self.notes.append(
                    "train_data() is a tf.data.Dataset: every rank reads all of it and takes its "
                    "own rows; resuming in mid-epoch reads the epoch from its start"
                )
            self._batches = Batches(
                source,
                self.task.batch_size,
                self.task.shards,
                self.task.last_batch,
                self.job.seed,
                self.strategy.own,
                self.strategy.replicas,
                micro_batch=self.job.micro_batch,
                prefetch=self.job.prefetch,
                threads=max(1, self.job.loader_workers),
                place=on_host,
            )
        return self._batches

    def evaluate(self, alive: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """The metrics over the task's evaluation data; every rank calls this."""
        source = self._evaluated()
        return {} if source is None else self._evaluator.run(source, alive)

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update.

        Sends a digest of the data, once.
        """
        evaluated = self._evaluated()
        self.compare()
        self._check_same("eval_data", evaluated)
        names = {} if evaluated is None else self._evaluator.rehearse(evaluated)
        check_metrics(self.job, names)

    def compare(self) -> None:
        """Raise where ranks have other training data; once. Every rank calls this."""
        if not self._compared:
            self._check_same("train_data", self.batches.source)
        self._compared = True

    def _check_same(self, name: str, source: Source | None) -> None:
        """Raise unless the data is the same on all ranks, as far as a digest shows it."""
        comm = self.strategy.comm
        if comm.size == 1:
            return
        check_same(name, comm.gather_texts(_identity_of(source)))
        if not isinstance(source, WholeDataset):
            return
        if len(set(comm.gather_texts(source.fingerprint()))) > 1:
            raise RequestError(
                asked=f"{name}() of the task: a tf.data.Dataset",
                found="its first batch is not the same on all ranks",
                why="each takes its own part of what all read, so all must read the same",
                do="draw from TensorFlow's generators alone, or return arrays",
            )

    def close(self) -> None:
        """Let go of the data, and of the threads that read it."""
        if self._batches is not None:
            self._batches.close()
        self._batches = self._eval_source = None

    def _evaluated(self) -> Source | None:
        """The evaluation data of the task, opened when first needed; `None` if it has none."""
        if self._eval_source is None:
            self._eval_source = open_data(self.task, "eval_data", self.model, self.job.seed)
        return self._eval_source


def _identity_of(source: Source | None) -> str:
    """What ranks must have in common, in a text; samples that are never alike by their number."""
    if isinstance(source, Arrays):
        size = sum(array.nbytes for array in arrays_in(source.arrays))
        rows = source.rows(rows_to_compare(len(source), size))
        return identity("arrays", len(source), digest_of(rows))
    if isinstance(source, Samples):
        digest = ""
        with suppress(Exception):  # what cannot be read is told where it is trained with
            read = source.samples.__getitem__
            samples = [read(number) for number in samples_to_compare(len(source))]
            if digest_of(read(0)) == digest_of(samples[0]):
                digest = digest_of(samples)
        return identity(type(source.samples).__name__, len(source), digest)
    return identity("nothing" if source is None else "a tf.data.Dataset", None, "")
