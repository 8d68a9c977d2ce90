"""A task's own methods as graphs: Python's `if` and `len` in them work on tensors, by AutoGraph.

The engine's own functions are not rewritten by it: that takes a second on every rank, and they need
none of it. As with `fit`, layers are not either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from allranks.training.keras_task import Task

METHODS = ("inputs", "loss", "weight", "regularizer", "metrics")


class InGraph:
    """A task whose `METHODS` are called while a graph is made; all else is the task's own."""

    def __init__(self, task: Task) -> None:
        self._task = task
        for name in METHODS:
            setattr(self, name, _rewritten(task, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def _rewritten(task: Task, name: str) -> Callable[..., Any]:
    """A method with AutoGraph's control flow; as it is where its source cannot be read."""
    plain: Callable[..., Any] = getattr(task, name)
    if not task.overrides(name):
        return plain
    try:
        return partial(tf.autograph.to_graph(getattr(type(task), name)), task)
    except (ValueError, TypeError, OSError, NotImplementedError):
        return plain
