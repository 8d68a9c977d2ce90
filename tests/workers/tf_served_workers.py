"""What a process of TensorFlow does in the tests of a job with servers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import tensorflow as tf

from allranks.tensorflow.parameter_server.trainer import RemoteStep, RemoteSteps
from allranks.tensorflow.step.inputs import HEAD


class Row:
    """The result of a step; the first `lost` of them went with the worker that had made them."""

    def __init__(self, is_lost: bool, loss: float) -> None:
        self.is_lost, self.loss = is_lost, loss

    def fetch(self) -> Any:
        if self.is_lost:
            raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")
        return np.array([[self.loss, *np.ones(HEAD + 3)]]), []


class Coordinator:
    """Schedules steps of which the first `lost` have no result to fetch."""

    def __init__(self, lost: int) -> None:
        self.lost, self.scheduled = lost, list[Any]()

    def schedule(self, graph: Any, args: Any) -> Row:
        self.scheduled.append((graph, args))
        return Row(len(self.scheduled) <= self.lost, float(len(self.scheduled)))


def a_row_that_is_lost_is_made_again(argument: Any) -> int:
    """The same step, with the same arguments, until a worker lives long enough to tell of it."""
    graphs = object.__new__(RemoteSteps)
    graphs.coordinator = Coordinator(lost=2)
    graphs._fetching = ThreadPoolExecutor(1)
    with closing(graphs):
        handed = RemoteStep("graph", ("data", "key", "numbers"))
        graphs._schedule(handed)
        found, deadline = None, time.monotonic() + 60
        while found is None and time.monotonic() < deadline:
            found = graphs.row(handed, 0.05)
    assert found is not None and found.loss == 3.0
    assert graphs.coordinator.scheduled == [("graph", ("data", "key", "numbers"))] * 3
    return 0
