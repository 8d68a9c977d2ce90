"""The data of a task: opened when it is first needed, cut for this rank, the same on every rank."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import largest_shard
from allranks.tensorflow.build import names_of, set_weights, values_of
from allranks.tensorflow.comm import translated
from allranks.tensorflow.data.batches import Arrays, Batches, Samples, Source
from allranks.tensorflow.data.nested import arrays_in, mapped
from allranks.tensorflow.data.tf_dataset import WholeDataset
from allranks.tensorflow.machine import described
from allranks.tensorflow.step.layers import InGraph
from allranks.tensorflow.step.step import full, weighted_losses
from allranks.tensorflow.strategies.base import TensorFlowStrategy
from allranks.training.engine.trainer import check_metrics, sets_of
from allranks.training.keras_task import Task
from allranks.training.same_data import (
    check_same,
    digest_of,
    identity,
    rows_to_compare,
    samples_to_compare,
)
from allranks.training.task_fields import metric_pairs, other_metrics

# --- evaluate ------------------------------------------------------------------------------------
# Exact evaluation: every sample once, nothing padded, the same numbers on any number of replicas.
#
# The data is cut into chunks of a fixed size, which go round the replicas of all ranks. Sums and
# counts of each chunk have a row of their own in one table, which is summed over the ranks once,
# with zeros from those that did not compute it; then the rows are added in order.


Chunk = Callable[[], Any]


def _as_it_is(arrays: Any) -> Any:
    return arrays


class Evaluator:
    """Evaluates `model` for `task` on the replicas of `strategy`, in chunks of a shard's size."""

    def __init__(self, task: Task, model: Any, strategy: TensorFlowStrategy) -> None:
        self.task: Any = InGraph(task)
        self.model, self.strategy = model, strategy
        self.chunk = largest_shard(task.batch_size, task.shards)
        self._names: list[str] = []
        self._call = tf.function(self._on_replicas, autograph=False)

    def run(self, source: Source, alive: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The metrics and the mean `loss` over all of `source`; every rank calls it."""
        rows: list[list[list[float]]] = []
        for group in self._groups(source):
            alive()
            rows += self._pairs(group)
        table = self.strategy.comm.sum(np.array(rows, np.float64))
        return self._finalized(table.cumsum(0)[-1])

    def rehearse(self, source: Source) -> dict[str, float]:
        """Evaluate the first samples, on the first replica of each rank; sends nothing.

        The weights are afterwards as they were, whatever a layer writes.
        """
        read, before = next(self._chunks(source)), values_of(names_of(self.model))
        pairs = np.array(self._pairs([(read, True)]))[0]
        set_weights(self.model, before)
        return {**dict.fromkeys(self._names, math.nan), **self._finalized(pairs)}

    def _finalized(self, sums: NDArray[np.float64]) -> dict[str, float]:
        """The metrics of the task from (metrics, 2): the sum and the count of each."""
        pairs = zip(self._names, sums, strict=True)
        means = {name: float(total / count) for name, (total, count) in pairs if count}
        finalized: dict[str, float] = self.task.finalize(means)
        return finalized

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
            group.append((chunk, replica in self.strategy.local_replicas))
            if replica == self.strategy.replicas - 1:
                yield group
                group = []
        if group:
            yield group

    def _pairs(self, group: list[tuple[Chunk, bool]]) -> list[list[list[float]]]:
        """For each chunk (sum, count) of every metric; zeros for those of other processes."""
        chunks = [read() for read, is_own in group if is_own]
        tables = iter(self._computed(chunks))
        if not self._names:  # none of the group is its own; the names must be known all the same
            self._computed([group[0][0]()])
        nothing = [[0.0, 0.0]] * len(self._names)
        return [next(tables) if is_own else nothing for _, is_own in group]

    def _computed(self, chunks: list[Any]) -> list[list[list[float]]]:
        if not chunks:
            return []
        spare = len(self.strategy.local_replicas) - len(chunks)
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
        pairs |= metric_pairs(task.metrics(full(output, kind), batch), "ops.sum(hits)")
        if self._names and list(pairs) != self._names:
            raise other_metrics(
                f"{list(pairs)} for one part of the data, {self._names} for another"
            )
        self._names = list(pairs)
        numbers = [tf.cast(tf.convert_to_tensor(n), tf.float64) for p in pairs.values() for n in p]
        return tf.reshape(tf.stack(numbers), (-1, 2))


class KerasTaskData:
    """What one rank reads for one task under one strategy: its batches, and its evaluation data."""

    def __init__(self, task: Task, job: Job, strategy: TensorFlowStrategy, model: Any) -> None:
        self.task, self.job, self.strategy, self.model = task, job, strategy, model
        self.notes: list[str] = []
        self._batches: Batches | None = None
        self._compared = False
        self._eval_source: Source | None = None
        self._evaluator = Evaluator(task, model, strategy)

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
            self._batches = Batches(source, self.task, self.job, self.strategy)
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
        self.compare_training()
        self._check_same("eval_data", evaluated)
        names = {} if evaluated is None else self._evaluator.rehearse(evaluated)
        check_metrics(self.job, names, self.task.plateau())

    def compare_training(self) -> None:
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
                do="draw from TensorFlow's generators alone, and in one thread: "
                "map(…, num_parallel_calls=AUTOTUNE) draws in the order of its threads, map(…) in "
                "that of the samples; or return arrays",
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


# --- open data -----------------------------------------------------------------------------------
# From a task's data to the source that reads it; refuses data that no source can read.


def open_data(task: Task, name: str, model: Any, seed: int) -> Source | None:
    """What reads `task.<name>()`; raises `RequestError`. Only training data is augmented.

    `None` where a task has no evaluation data.
    """
    method = getattr(task, name)
    tf.random.set_seed(seed % 2**31)  # a split that is drawn there is the same on every rank
    data = method()
    if data is None and name == "eval_data":
        return None
    if name == "eval_data" and "" not in sets_of(data):
        problem = f"several sets: {', '.join(data)}"
        raise _unusable(
            name, problem, "this engine evaluates on one", "--engine torch, or return one"
        )
    augments = name == "train_data" and task.overrides("augment")
    if isinstance(data, tf.data.Dataset):
        if augments:
            problem = "a tf.data.Dataset, and augment() of the task"
            raise _unusable(name, problem, "it changes its samples itself", "use its map()")
        return WholeDataset(task, name, seed, _input_ndim(model))
    source = _by_number(data, name)
    if augments:
        samples = source if isinstance(source, Arrays) else source.samples
        source = Samples(samples, augments=True)
    if len(source) == 0:
        raise _unusable(name, "0 samples", "there is nothing to learn from", "give it some")
    return source


def _by_number(data: Any, name: str) -> Arrays | Samples:
    if isinstance(data, (tuple, dict, UserDict, np.ndarray, tf.Tensor)):
        for value in arrays_in(data):
            if not isinstance(value, (np.ndarray, tf.Tensor)):
                why = "all must be arrays, with the samples along axis 0"
                raise _unusable(name, f"{described(value)} among arrays", why, "np.asarray of it")
        arrays = mapped(np.asarray, data)
        lengths = {len(array) if array.ndim else 0 for array in arrays_in(arrays)}
        if len(lengths) != 1:
            problem = f"lengths {sorted(lengths)}"
            why = "axis 0 is the samples of each"
            raise _unusable(name, problem, why, "cut them to one length")
        return Arrays(arrays)
    if isinstance(data, list) and data and all(_is_long(item) for item in data):
        raise _unusable(
            name,
            f"a list of {len(data)} arrays",
            "a list is taken for samples, and these may be columns",
            "return a tuple of the columns, or a list of tuples",
        )
    kinds = {kind.__name__ for kind in type(data).__mro__}
    if "PyDataset" in kinds:
        why = "it makes batches by itself, in an order of its own"
        raise _unusable(name, described(data), why, "return what it reads: samples by number")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Samples(data)
    raise _unusable(
        name,
        described(data),
        "it has neither samples by number nor an order of its own",
        "return arrays, something with __getitem__ and __len__, or a tf.data.Dataset",
    )


def _is_long(item: Any) -> bool:
    return isinstance(item, (np.ndarray, tf.Tensor)) and item.ndim > 0


def _input_ndim(model: Any) -> int | None:
    """The axes of the first input of a model, with that of the samples, if it says so."""
    inputs = getattr(model, "inputs", None)
    return len(inputs[0].shape) if inputs else None


def _unusable(name: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(asked=f"{name}() of the task", found=found, why=why, do=do)
