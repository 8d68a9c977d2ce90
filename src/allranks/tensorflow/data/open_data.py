"""From a task's data to the source that reads it; refuses data that no source can read."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import tensorflow as tf

from allranks.errors import RequestError
from allranks.tensorflow.data.batches import Arrays, Samples, augmenting
from allranks.tensorflow.data.nested import arrays_in, mapped
from allranks.tensorflow.data.tf_dataset import WholeDataset
from allranks.tensorflow.machine import described
from allranks.training.evaluation_plan import sets_of
from allranks.training.keras_task import Task

Source = Arrays | Samples | WholeDataset


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
        last = task.last_batch if name == "train_data" else "keep"
        return WholeDataset(
            method, task.batch_size, seed, last, task.inputs, _input_ndim(model), name
        )
    source = _by_number(data, name)
    if augments:
        samples = _ArrayRows(source) if isinstance(source, Arrays) else source.samples
        source = Samples(samples, augmenting(task.augment, seed))
    if len(source) == 0:
        raise _unusable(name, "0 samples", "there is nothing to learn from", "give it some")
    return source


class _ArrayRows:
    """Arrays as samples by number."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, number: int) -> Any:
        return mapped(lambda array: array[number], self._arrays.arrays)


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
