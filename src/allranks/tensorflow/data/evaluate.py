"""Exact evaluation: every sample once, nothing padded, the same numbers on any number of replicas.

The data is cut into chunks of a fixed size, which go round the replicas of all ranks. Sums and
counts of each chunk have a row of their own in one table, which is summed over the ranks once, with
zeros from those that did not compute it; then the rows are added in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks.errors import RequestError
from allranks.tensorflow.comm import translated
from allranks.tensorflow.data.nested import mapped
from allranks.tensorflow.data.open_data import Source
from allranks.tensorflow.data.tf_dataset import WholeDataset
from allranks.tensorflow.step.layers import InGraph
from allranks.tensorflow.step.step import full, weighted_losses
from allranks.tensorflow.strategies.base import Strategy
from allranks.training.keras_task import Task

Chunk = Callable[[], Any]


def _as_it_is(arrays: Any) -> Any:
    return arrays


class Evaluator:
    """Evaluates `model` for `task` on the replicas of `strategy`, in chunks of `chunk` samples."""

    def __init__(self, task: Task, model: Any, strategy: Strategy, chunk: int) -> None:
        self.task: Any = InGraph(task)
        self.model, self.strategy, self.chunk = model, strategy, chunk
        self._names: list[str] = []
        self._call = tf.function(self._on_replicas, autograph=False)

    def run(self, source: Source, alive: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The metrics and the mean `loss` over all of `source`; every rank calls it."""
        rows: list[list[list[float]]] = []
        for group in self._groups(source):
            alive()
            rows += self._pairs(group)
        table = self.strategy.comm.sum(np.array(rows, np.float64))
        sums = table.cumsum(0)[-1]
        means = {
            name: float(total / count)
            for name, (total, count) in zip(self._names, sums, strict=True)
            if count
        }
        finalized: dict[str, float] = self.task.finalize(means)
        return finalized

    def rehearse(self, source: Source) -> dict[str, float]:
        """Evaluate the first samples, on the first replica of each rank: every name, no message."""
        read = next(self._chunks(source))
        pairs = np.array(self._pairs([(read, True)]))[0]
        found = {
            name: float(total / count)
            for name, (total, count) in zip(self._names, pairs, strict=True)
            if count
        }
        return {**dict.fromkeys(self._names, math.nan), **self.task.finalize(found)}

    def _chunks(self, source: Source) -> Iterator[Chunk]:
        """What reads each chunk; of a `tf.data.Dataset` every rank reads all."""
        if isinstance(source, WholeDataset):
            yield from (partial(_as_it_is, arrays) for arrays, _ in source.open(0))
            return
        for start in range(0, len(source), self.chunk):
            ids = np.arange(start, min(start + self.chunk, len(source)))
            yield partial(source.rows, ids)

    def _groups(self, source: Source) -> Iterator[list[tuple[Chunk, bool]]]:
        """Chunks for all replicas at once, each with whether it is one of this process."""
        group: list[tuple[Chunk, bool]] = []
        for number, chunk in enumerate(self._chunks(source)):
            replica = number % self.strategy.replicas
            group.append((chunk, replica in self.strategy.own))
            if replica == self.strategy.replicas - 1:
                yield group
                group = []
        if group:
            yield group

    def _pairs(self, group: list[tuple[Chunk, bool]]) -> list[list[list[float]]]:
        """For each chunk (sum, count) of every metric; zeros for those of other processes."""
        own = [read() for read, is_own in group if is_own]
        found = iter(self._computed(own))
        if (
            not self._names
        ):  # nothing of the group was its own: the names must be known all the same
            self._computed([group[0][0]()])
        nothing = [[0.0, 0.0]] * len(self._names)
        return [next(found) if is_own else nothing for _, is_own in group]

    def _computed(self, chunks: list[Any]) -> list[list[list[float]]]:
        if not chunks:
            return []
        spare = len(self.strategy.own) - len(chunks)
        empty = mapped(lambda array: array[:0], chunks[0])
        parts = [mapped(tf.convert_to_tensor, part) for part in (*chunks, *[empty] * spare)]
        with translated():
            tables = self._call(self.strategy.feed(parts))
        local = self.strategy.distribution.experimental_local_results(tables)
        return [table.numpy().tolist() for table in local[: len(chunks)]]

    def _on_replicas(self, data: Any) -> Any:
        return self.strategy.distribution.run(self._table, args=(data,))

    def _table(self, batch: Any) -> Any:
        """(metrics, 2): sums and counts over one chunk. No communication."""
        samples = tf.nest.flatten(batch)[0].shape[0]
        task, kind = self.task, tf.as_dtype(keras.config.floatx())
        if samples == 0:
            return tf.zeros((len(self._names), 2), tf.float64)
        output = self.model(task.inputs(batch), training=False)
        losses, weight = weighted_losses(task, output, batch, samples, kind)
        pairs: dict[str, tuple[Any, Any]] = {"loss": (tf.reduce_sum(losses), weight)}
        for name, pair in task.metrics(full(output, kind), batch).items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise RequestError(
                    asked="metrics(output, batch) of the task",
                    found=f"{name} = {pair!r}"[:200],
                    why="a metric is a pair (sum, count) over the samples of the batch",
                    do="return for example {'accuracy': (ops.sum(hits), len(hits))}",
                )
            pairs[name] = pair
        if self._names and list(pairs) != self._names:
            raise RequestError(
                asked="metrics(output, batch) of the task",
                found=f"{list(pairs)} for one part of the data, {self._names} for another",
                why="sums are kept by name, so every batch must give the same metrics in one order",
                do="return every metric for every batch, with (0, 0) where there is nothing",
            )
        self._names = list(pairs)
        numbers = [tf.cast(tf.convert_to_tensor(n), tf.float64) for p in pairs.values() for n in p]
        return tf.reshape(tf.stack(numbers), (-1, 2))
