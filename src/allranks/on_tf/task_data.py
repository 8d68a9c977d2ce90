"""The data of a task: opened when it is first needed, cut for this rank, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from allranks.errors import RequestError
from allranks.job import Job
from allranks.on_tf.data import Batches
from allranks.on_tf.evaluate import Evaluator
from allranks.on_tf.open_data import Source, open_data
from allranks.on_tf.strategies.base import Strategy
from allranks.on_tf.task import Task
from allranks.on_tf.whole_dataset import WholeDataset
from allranks.shards import largest_shard
from allranks.training.course import check_metrics


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
                    "own rows; going on in mid-epoch reads the epoch from its start"
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

        Sends a digest of what a `tf.data.Dataset` gives, where the task hands in one.
        """
        evaluated = self._evaluated()
        self._check_same("train_data", self.batches.source)
        self._check_same("eval_data", evaluated)
        names = {} if evaluated is None else self._evaluator.rehearse(evaluated)
        check_metrics(self.job, names)

    def _check_same(self, name: str, source: Source | None) -> None:
        """Raise unless a `tf.data.Dataset` begins alike on all ranks."""
        comm = self.strategy.comm
        if not isinstance(source, WholeDataset) or comm.size == 1:
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
        """The evaluation data of the task, opened when it is first needed; `None` if it has none."""
        if self._eval_source is None:
            self._eval_source = open_data(self.task, "eval_data", self.model, self.job.seed)
        return self._eval_source
