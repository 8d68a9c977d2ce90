"""A `tf.data.Dataset` as a task's data: it has an order of its own, and is read from its begin.

`train_data()` is called anew for each epoch with TensorFlow's generators keyed by (seed, epoch), so
every process sees the same batches, and a run can go on in mid-epoch: it reads the epoch again up
to there. Random operations in a parallel `map` without a seed may still draw in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from allranks.errors import RequestError
from allranks.tensorflow.data.nested import arrays_in, mapped
from allranks.training.keras_task import Task
from allranks.training.order import random_key


class WholeDataset:
    """The batches of the `tf.data.Dataset` that the method `name` of the task returns.

    `input_ndim` is the number of axes of the model's first input, with that of the samples. It
    distinguishes a data set of samples from one of batches.
    """

    def __init__(self, task: Task, name: str, seed: int, input_ndim: int | None) -> None:
        self._make, self._name, self._seed = getattr(task, name), name, seed
        self._size, self._first_input, self._ndim = task.batch_size, task.inputs, input_ndim
        self._last = task.last_batch if name == "train_data" else "keep"
        cardinality = int(self._batched(self._opened(0)).cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise self._refused("it never ends", "an epoch has an end", "dataset.take(…) of it")
        if cardinality == 0:
            raise self._refused("nothing in it", "there is nothing to learn from", "give it some")
        self._known = cardinality if cardinality > 0 and self._last == "keep" else None
        self.steps_per_epoch = self._known

    def open(self, epoch: int, skip: int = 0) -> Iterator[tuple[Any, int]]:
        """The batches of one epoch as arrays, with their samples, from number `skip` on."""
        self.steps_per_epoch = self._known
        number, pending, short = 0, None, 0
        for batch in self._batched(self._opened(epoch)).prefetch(tf.data.AUTOTUNE):
            if short:
                problem = f"a batch of {short} samples in the midst of an epoch"
                why = f"every batch but the last is a global batch: batch_size = {self._size}"
                raise self._refused(
                    problem, why, f"--set batch_size={short}, or .batch({self._size})"
                )
            arrays = mapped(np.asarray, batch)
            rows = self._rows(arrays)
            short = rows if rows < self._size else 0
            if short and self._last == "drop":
                continue
            if pending is not None:
                yield pending
            pending = (arrays, rows) if number >= skip else None
            number += 1
        if number == 0:
            raise self._refused("no batch in it", "there is nothing to learn from", "give it some")
        self.steps_per_epoch = number  # before the last batch, whose consumer may read it
        if pending is not None:
            yield pending

    def fingerprint(self) -> str:
        """What all ranks must have in common: the first batch of the first epoch."""
        digest = hashlib.blake2b(digest_size=16)
        arrays, _ = next(self.open(0))
        for array in arrays_in(arrays):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _opened(self, epoch: int) -> Any:
        tf.random.set_seed(random_key(self._seed, epoch) % 2**31)
        dataset = self._make()
        options = tf.data.Options()
        options.deterministic = True
        return dataset.with_options(options)

    def _batched(self, dataset: Any) -> Any:
        spec = next(arrays_in(dataset.map(self._input_of).element_spec))
        is_batched = spec.shape.rank == self._ndim
        if not is_batched and self._ndim is not None and spec.shape.rank != self._ndim - 1:
            problem = f"inputs of {spec.shape.rank} axes, where the model takes {self._ndim}"
            why = "neither samples nor batches of them fit the model"
            raise self._refused(problem, why, "let its elements be samples, or .batch() them")
        if self._ndim is None:
            is_batched = self._seems_batched(dataset)
        return dataset if is_batched else dataset.batch(self._size)

    def _input_of(self, *element: Any) -> Any:
        return self._first_input(element if len(element) > 1 else element[0])

    def _seems_batched(self, dataset: Any) -> bool:
        """Whether all tensors of an element begin with one length, as those of a batch do."""
        shapes = [spec.shape for spec in arrays_in(dataset.element_spec)]
        return all(s.rank for s in shapes) and {s[0] for s in shapes} <= {None, self._size}

    def _rows(self, arrays: Any) -> int:
        rows = {len(array) for array in arrays_in(arrays)}
        if len(rows) != 1:
            problem = f"arrays of {sorted(rows)} rows in one batch"
            raise self._refused(
                problem, "axis 0 of each is the samples", "batch samples that are alike"
            )
        (samples,) = rows
        if samples > self._size:
            raise self._refused(
                f"a batch of {samples} samples",
                f"what it gives is the global batch of a step: batch_size = {self._size}",
                f"--set batch_size={samples}, or .batch({self._size})",
            )
        return samples

    def _refused(self, found: str, why: str, do: str) -> RequestError:
        subject = f"{self._name}() of the task: a tf.data.Dataset"
        return RequestError(asked=subject, found=found, why=why, do=do)
