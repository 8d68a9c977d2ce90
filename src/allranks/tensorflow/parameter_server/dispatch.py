"""Steps that are handed out to workers: the same graph as everywhere, run on another process.

A step is scheduled and comes back later, as a row of numbers. Where the data of the task are arrays
each worker holds a copy of them, sent once, and a step is told the numbers of its samples; else the
batch goes along with the step. A step whose worker dies, before its row was fetched from there, is
run by another one: it may then have been applied twice, never not at all.

The updates of a step go to the servers one variable at a time, while other workers read and update
the same ones: between them there is no lock but that of each single update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.tensorflow.comm import peer_lost
from allranks.tensorflow.data.nested import mapped
from allranks.tensorflow.step.inputs import Cut, Insides, StepInputs, StepSums, pack
from allranks.tensorflow.step.step import Graphs

Row = tuple[NDArray[np.float64], Insides]

TIMES = 16  # a step is tried again; where no server is left the supervisor ends it sooner


@dataclass(eq=False)
class RemoteStep:
    """A step that a worker has, or will have soon, and how often it was handed out."""

    graph: Any
    arguments: tuple[Any, ...]
    times: int = 0
    row: Future[Row] = field(default_factory=Future)


class RemoteSteps(Graphs):
    """The graphs of steps that the workers of `coordinator` run."""

    coordinator: Any
    _held: Any = None
    _fetching: ThreadPoolExecutor

    @property
    def holds(self) -> bool:
        """Whether the workers hold the data."""
        return self._held is not None

    def serve(self, coordinator: Any, trained: list[Any]) -> None:
        """Once, before the first step: who runs them, and the variables that are trained."""
        self.coordinator, self.variables = coordinator, trained
        self._fetching = ThreadPoolExecutor(1, "allranks-results")

    def hold(self, arrays: Any) -> None:
        """Give every worker a copy of these arrays; from now on data are the numbers of samples."""
        tensors = mapped(tf.convert_to_tensor, arrays)
        self._specs = mapped(tf.TensorSpec.from_tensor, tensors)

        def data() -> Any:
            return tf.data.Dataset.from_tensors(tensors).repeat()

        self._held = iter(self.coordinator.create_per_worker_dataset(data))

    def schedule(self, data: Any, cut: Cut, says: StepInputs) -> RemoteStep:
        """A worker will run this step; rows are fetched in the order of the calls."""
        arguments = data, pack([says])
        known = cut, 1
        if known not in self._made:
            self._made[known] = self._graph(cut, arguments)
        held = () if self._held is None else (self._held,)
        handed = RemoteStep(self._made[known], (*held, *arguments))
        self._schedule(handed)
        return handed

    def row(self, handed: RemoteStep, timeout_s: float) -> StepSums | None:
        """What a step said; `None` if it is not done within `timeout_s`."""
        try:
            rows, insides = handed.row.result(timeout_s)
        except TimeoutError:
            return None
        except tf.errors.UnavailableError as error:
            if handed.times > TIMES:
                raise peer_lost(error) from error
        except tf.errors.OpError as error:
            raise self._cause(error) from error
        else:
            self.tell(insides)
            return self._read(rows[0])
        self._schedule(handed)
        return None

    def _schedule(self, handed: RemoteStep) -> None:
        try:
            value = self.coordinator.schedule(handed.graph, args=handed.arguments)
        except tf.errors.OpError as error:
            raise self._cause(error) from error
        handed.row = self._fetching.submit(value.fetch)
        handed.times += 1

    def wait_all(self) -> None:
        """Return when no step is under way."""
        try:
            self.coordinator.join()
        except tf.errors.OpError as error:
            raise peer_lost(error) from error

    def close(self) -> None:
        """Fetch no more."""
        self._fetching.shutdown(wait=False, cancel_futures=True)

    def _cause(self, error: Exception) -> Exception:
        """Of steps that were cancelled because another one failed, the error of that one."""
        if isinstance(error, tf.errors.CancelledError):
            try:
                self.coordinator.join()
            except tf.errors.OpError as first:
                return peer_lost(first)
        return peer_lost(error)

    def _graph(self, cut: Cut, arguments: Any) -> Any:
        """The graph of a step. It is made outside of the scope of the strategy: see there."""
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
        if self._held is None:
            return tf.function(partial(self._one, cut)).get_concrete_function(*specs)

        def by_number(arrays: Any, numbers: Any, *rest: Any) -> Any:
            return self._one(cut, tf.nest.map_structure(partial(_rows, arrays), numbers), *rest)

        inner = tf.function(by_number).get_concrete_function(self._specs, *specs)

        def outer(held: Any, *rest: Any) -> Any:
            return inner(next(held), *rest)

        return tf.function(outer)


def _rows(arrays: Any, numbers: Any) -> Any:
    """The samples of these numbers, as far as the graph can tell so many."""
    return mapped(lambda array: tf.gather(array, numbers), arrays)


# --- in flight -----------------------------------------------------------------------------------
# Batches that are handed out ahead of the one whose result is waited for; how many is bounded.
#
#     upcoming --> hand out --> under way (at most `most`) --> the oldest is yielded, and waited for
#
# Results are taken in the order of the job, whatever order the work is done in. Where something is
# to be done between two batches with nothing under way, the second one is held back until then.


T = TypeVar("T")
Result = TypeVar("Result")


@dataclass
class Ahead(Generic[T, Result]):
    """What is under way, oldest first.

    `schedule(item)` begins the work on one. `holds_back(last, item)` says whether `item` has to
    wait until nothing is under way, where `last` was handed out last; it is asked again and again.
    """

    most: int
    schedule: Callable[[T], Result]
    holds_back: Callable[[T, T], bool]
    _under_way: deque[tuple[T, Result]] = field(default_factory=deque)

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    def take(self) -> tuple[T, Result]:
        """The oldest, which is not under way for us any more: its result is waited for now."""
        return self._under_way.popleft()

    def through(self, upcoming: Iterator[T], is_over: Callable[[], bool]) -> Iterator[T]:
        """Each item in order, once it and the next ones are handed out; `take` it before the next.

        When `is_over`, nothing more is handed out.
        """
        held: list[T] = []
        while True:
            while len(self._under_way) < self.most and not is_over():
                held = held or [item for item in (next(upcoming, None),) if item is not None]
                if not held or (
                    self._under_way and self.holds_back(self._under_way[-1][0], held[0])
                ):
                    break
                item = held.pop()
                self._under_way.append((item, self.schedule(item)))
            if not self._under_way:
                return
            yield self._under_way[0][0]
