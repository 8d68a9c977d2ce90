"""The trainer of a job with servers: the same loop, over steps that workers make in their own time.

`batches` hands out ahead: when it yields a batch, that one and up to `most_under_way` - 1 after it
are with the workers already; `step` waits for its result. So results, rows of the metrics and the
progress come in the order of the job, while the updates were made in the order in which workers
came to them. How stale a gradient can be is bounded: batch b is handed out only when batch
b - `most_under_way` is done, so while a worker has it, at most the N - 1 batches that others had
already and the `most_under_way` - 1 after it can be applied.

Nothing is under way where the job evaluates or saves: no batch behind such a point is handed out
before all up to it are done. With one worker each step sees the update of the one before it, and
all is equal to `single`.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.tensorflow.comm import peer_lost
from allranks.tensorflow.data.batches import Arrays, ReplicaBatch
from allranks.tensorflow.data.nested import mapped
from allranks.tensorflow.parameter_server.in_flight import Ahead
from allranks.tensorflow.saving import KerasVariables
from allranks.tensorflow.step.inputs import InputSplit, Insides, StepInputs, StepSums, pack
from allranks.tensorflow.step.step import Graphs
from allranks.tensorflow.strategies.base import BuiltKerasModel
from allranks.tensorflow.strategies.parameter_server import ParameterServerChief, pieces_of
from allranks.tensorflow.trainer import Trainer
from allranks.training.keras_task import Task
from allranks.training.progress import NOTHING, RankRequests, StepResult

# --- dispatch ------------------------------------------------------------------------------------
# Steps that are handed out to workers: the same graph as everywhere, run on another process.
#
# A step is scheduled and comes back later, as a row of numbers. Where the data of the task are
# arrays each worker holds a copy of them, sent once, and a step is told the numbers of its samples;
# else the batch goes along with the step. A step whose worker dies, before its row was fetched from
# there, is run by another one: it may then have been applied twice, never not at all.
#
# The updates of a step go to the servers one variable at a time, while other workers read and
# update the same ones: between them there is no lock but that of each single update.


Row = tuple[NDArray[np.float64], Insides]

TIMES = 16  # a step is tried again; where no server is left the supervisor ends it sooner


@dataclass(eq=False)
class RemoteStep:
    """A step that is scheduled on a worker, and how often it was scheduled."""

    graph: Any
    arguments: tuple[Any, ...]
    times: int = 0
    row: Future[Row] = field(default_factory=Future)


class RemoteSteps(Graphs):
    """The graphs of steps that the workers of the chief's `coordinator` run."""

    datasets: Any = None
    """The arrays of the task, once the workers have them."""

    def __init__(self, task: Task, built: BuiltKerasModel, strategy: Any, **more: Any) -> None:
        super().__init__(task, built, strategy, **more)
        self.coordinator = strategy.coordinator
        self._fetching = ThreadPoolExecutor(1, "allranks-results")

    def hold(self, arrays: Any) -> None:
        """Give every worker a copy of these arrays; from now on data are indices of samples."""
        tensors = mapped(tf.convert_to_tensor, arrays)
        self._specs = mapped(tf.TensorSpec.from_tensor, tensors)

        def data() -> Any:
            return tf.data.Dataset.from_tensors(tensors).repeat()

        self.datasets = iter(self.coordinator.create_per_worker_dataset(data))

    def schedule(self, data: Any, cut: InputSplit, says: StepInputs) -> RemoteStep:
        """Schedule a step on a worker; rows are fetched in the order of the calls."""
        arguments = data, pack([says])
        known = cut, 1
        if known not in self._made:
            self._made[known] = self._graph(cut, arguments)
        held_data = () if self.datasets is None else (self.datasets,)
        handed = RemoteStep(self._made[known], (*held_data, *arguments))
        self._schedule(handed)
        return handed

    def row(self, handed: RemoteStep, timeout_s: float) -> StepSums | None:
        """The result of a step; `None` if it is not done within `timeout_s`."""
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
            self.probe_insides(insides)
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
        """Return when no step is in flight."""
        try:
            self.coordinator.join()
        except tf.errors.OpError as error:
            raise peer_lost(error) from error

    def close(self) -> None:
        """Fetch no more."""
        self._fetching.shutdown(wait=False, cancel_futures=True)

    def _cause(self, error: Exception) -> Exception:
        """The cause of an error: of a cancelled step, the error of the step that failed."""
        if isinstance(error, tf.errors.CancelledError):
            try:
                self.coordinator.join()
            except tf.errors.OpError as first:
                return peer_lost(first)
        return peer_lost(error)

    def _graph(self, cut: InputSplit, arguments: Any) -> Any:
        """The graph of a step, traced outside the scope of the strategy (see its module)."""
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
        if self.datasets is None:
            return tf.function(partial(self._one, cut)).get_concrete_function(*specs)

        def by_number(arrays: Any, numbers: Any, *inputs: Any) -> Any:
            return self._one(cut, tf.nest.map_structure(partial(_rows, arrays), numbers), *inputs)

        inner = tf.function(by_number).get_concrete_function(self._specs, *specs)

        def outer(datasets: Any, *inputs: Any) -> Any:
            return inner(next(datasets), *inputs)

        return tf.function(outer)


def _rows(arrays: Any, numbers: Any) -> Any:
    """The samples with these indices."""
    return mapped(lambda array: tf.gather(array, numbers), arrays)


POLL_S = 0.5
PART = re.compile(r"_part_([0-9]+)_of_([0-9]+)")
WHOLE_VARIABLE_OPTIMIZERS = ("Adafactor", "Lamb", "Muon")


class ServedState(KerasVariables):
    """A state whose sharded variables are whole: any number of servers resumes from it."""

    def __init__(self, built: BuiltKerasModel) -> None:
        super().__init__(built)
        self._parts = _by_whole(self._kept)

    def arrays(self) -> dict[str, Any]:
        state = super().arrays()
        arrays = state["optimizer"]
        whole = {
            name: np.concatenate([arrays[p] for p in parts]) if parts[1:] else arrays[parts[0]]
            for name, parts in self._parts.items()
        }
        return {**state, "optimizer": whole}

    def load(self, state: dict[str, Any]) -> None:
        arrays: dict[str, Any] = {}
        for name, array in state["optimizer"].items():
            parts = self._parts.get(name, [name])
            sizes = [self._kept[part].shape[0] for part in parts] if len(parts) > 1 else []
            cut = np.split(array, np.cumsum(sizes)[:-1]) if sizes else [array]
            arrays |= dict(zip(parts, cut, strict=True))
        super().load({**state, "optimizer": arrays})


def _by_whole(names: dict[str, Any]) -> dict[str, list[str]]:
    """The names of whole variables, each with the names of its parts in order."""
    parts_of: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        part = PART.search(name)
        number = int(part[1]) if part else 0
        parts_of.setdefault(PART.sub("", name), []).append((number, name))
    return {whole: [name for _, name in sorted(parts)] for whole, parts in parts_of.items()}


class ChiefTrainer(Trainer):
    """The chief's trainer of a job with servers. Workers and servers have none."""

    strategy: ParameterServerChief
    graphs: RemoteSteps
    graphs_kind = RemoteSteps
    state_kind = ServedState

    def __init__(self, task: Task, job: Job | None = None, **more: Any) -> None:
        self._asked = NOTHING
        if task.overrides("plateau"):
            raise RequestError(
                asked="plateau() of the task with --strategy parameter-server",
                found="workers that compute steps ahead of the evaluations",
                why="the rate of a step is set when it is sent to a worker",
                do="--strategy multi-worker-mirrored, or schedule(step)",
            )
        super().__init__(task, job, **more)
        most = 1 if self.job.trace else self.strategy.most_under_way  # a trace sees each step end
        self._ahead = Ahead[ReplicaBatch, RemoteStep](most, self._scheduled, self._holds_back)
        name = type(self.built.optimizer).__name__
        is_cut = any(len(pieces_of(v.value)) > 1 for v in self.built.model.trainable_variables)
        if is_cut and name in WHOLE_VARIABLE_OPTIMIZERS:
            raise RequestError(
                asked=f"the optimizer {name} on variables that are cut over servers",
                found=f"{name}, whose update follows from a whole variable",
                why="each server updates its part by itself",
                do="--strategy parameter-server:partition=none, or another optimizer",
            )

    # --- the loop -------------------------------------------------------------------------

    def batches(
        self, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[ReplicaBatch]:
        """The next global batches; workers have them already. Give each one to `step`."""
        self._send_data_to_workers()
        upcoming = super().batches(epochs, steps)
        return self._ahead.through(upcoming, lambda: self.evaluation_plan.is_over)

    def steps(self, batches: list[ReplicaBatch]) -> list[StepResult]:
        """Wait for the results of scheduled steps, in their order."""
        return [self._step(batch) for batch in batches]

    def _step(self, batch: ReplicaBatch) -> StepResult:
        oldest, handed = self._ahead.pop_oldest()
        assert oldest is batch, "batches are given to `step` in their order"
        sums = self._waited(handed)
        if not self._ahead:  # requests are served when nothing is in flight
            sums = dataclasses.replace(sums, stop=self._asked.stop, save=self._asked.save)
            self._asked = NOTHING
        result = self._judge(batch, sums)
        self.faults.reach("stepped", batch.index)
        return result

    def _waited(self, handed: RemoteStep) -> StepSums:
        """Wait for the result of a step; one that takes too long counts as a hang of the chief."""
        self.heartbeat.enter("exchange")
        self.heartbeat.collective()
        begun, reported = time.monotonic(), False
        while (sums := self.graphs.row(handed, POLL_S)) is None:
            waited_s, limit_s = time.monotonic() - begun, self.job.hang_timeout
            if limit_s and waited_s > limit_s and not reported:
                reported = bool(self.heartbeat.enter("compute"))
        self.heartbeat.enter("data")
        return sums

    def _scheduled(self, batch: ReplicaBatch) -> RemoteStep:
        self.heartbeat.at_step(batch.index)
        self.heartbeat.enter("compute")
        if self.graphs.probe is not None:
            self.graphs.probe.begin(batch)
        self.faults.reach("step", batch.index)
        says = self._says(batch, len(self._ahead), NOTHING)
        self._poison = 1.0
        (parts,) = batch.parts
        return self.graphs.schedule(parts, batch.cut, says)

    def _holds_back(self, last: ReplicaBatch, batch: ReplicaBatch) -> bool:
        """Whether an evaluation, save or stop may be due between these two batches."""
        heartbeat, requests = self.heartbeat, self._asked
        self._asked = RankRequests(
            requests.stop or heartbeat.wants_stop, requests.save or heartbeat.wants_save()
        )
        new_epoch = self.job.eval_every == "epoch" and batch.epoch != last.epoch
        return new_epoch or self._asked != NOTHING or self._is_due_after(last)

    def _send_data_to_workers(self) -> None:
        """Send arrays to every worker once; from then on a batch is made of indices of samples."""
        batches = self.task_data.batches
        source = batches.source
        if isinstance(source, Arrays) and self.graphs.datasets is None:
            self.graphs.hold(source.arrays)
            batches.source = Arrays(np.arange(len(source)))

    # --- between the steps ----------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """The exact metrics over the evaluation data; waits for all steps first."""
        self.graphs.wait_all()
        return super().evaluate()

    def save(self, *, wait: bool = True, evaluate: bool = True) -> bool:
        """Save a checkpoint, once nothing is in flight.

        In a custom loop, a resumed run repeats the batches that were in flight.
        """
        self.graphs.wait_all()
        return super().save(wait=wait, evaluate=evaluate)

    def close(self) -> None:
        self.graphs.close()
        super().close()
