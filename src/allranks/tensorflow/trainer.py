"""The trainer of the TensorFlow engine: one training of a Keras task, step by step.

`allranks train` is the short loop `fit` over it; a loop of one's own uses the same object:

    with Trainer(task) as trainer:
        for batch in trainer.batches():
            result = trainer.step(batch)
        print(trainer.evaluate())
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import tensorflow as tf
from numpy.typing import NDArray

from allranks.catalog import STRATEGIES, TENSORFLOW, load
from allranks.job.engines import default_strategy
from allranks.job.job import Job
from allranks.job.limits import check_engine
from allranks.launcher.world import World
from allranks.strategies.resolve import resolved_strategy
from allranks.strategies.roles import TRAINER
from allranks.tensorflow.build import build, let_sum_again, names_of, value_of, values_of
from allranks.tensorflow.data.batches import ReplicaBatch
from allranks.tensorflow.data.task_data import KerasTaskData
from allranks.tensorflow.machine import (
    check_backend,
    check_task_limits,
    flip_one_bit,
    set_arithmetic,
)
from allranks.tensorflow.saving import KerasVariables, TensorFlowSaving, digest_of_state
from allranks.tensorflow.step.inputs import StepInputs, StepSums
from allranks.tensorflow.step.layers import restore_layers, shard_norms
from allranks.tensorflow.step.step import Graphs, StepResultBuilder
from allranks.tensorflow.strategies.base import BuiltKerasModel, TensorFlowStrategy
from allranks.training.callback import Callback, around_evaluation
from allranks.training.engine.saved_job import CallbackStates
from allranks.training.engine.trainer import (
    EngineTrainer,
    StopAgreement,
    scheduled_steps,
    warn_ignored,
)
from allranks.training.keras_task import Task
from allranks.training.order import random_key
from allranks.training.progress import Progress, RankRequests, StepResult
from allranks.training.schedules import schedule_of
from allranks.training.task_fields import check_task

# --- user variables ------------------------------------------------------------------------------
# Variables that a layer writes in its forward pass: they follow what one replica sees.
#
# Found by looking: what no update changes, and is another one after the first step, a layer wrote.


class WrittenVariables:
    """Looks at `model` around its first step; `names` are the variables that were written."""

    def __init__(self, model: Any) -> None:
        self.names: list[str] = []
        self._model = model
        self._before: dict[str, Any] | None = None

    def before_step(self) -> None:
        """Remember them. Moving statistics that the engine updates are not among them."""
        if self._before is not None:
            return
        ours = [v for n in shard_norms(self._model) for v in (n.moving_mean, n.moving_variance)]
        known = {id(v) for v in (*self._model.trainable_variables, *ours)}
        others = {name: v for name, v in names_of(self._model).items() if id(v) not in known}
        self._before = values_of(others)

    def after_step(self) -> None:
        """Compare them, once."""
        if self._before:
            now = names_of(self._model)
            self.names = [n for n, was in self._before.items() if (value_of(now[n]) != was).any()]
            self._before = {}


class Trainer(EngineTrainer[ReplicaBatch]):
    """Trains `task` as `job` says, on the ranks that the environment describes (or `world`).

    Every rank makes one and calls the same methods in the same order. Making it takes devices,
    joins the ranks and builds the model. Raises `RequestError` for what cannot be trained.
    `report(event, **values)` hears of checkpoints, from another thread too; `fit` calls `callbacks`
    before those of the task.
    """

    task: Task
    built: BuiltKerasModel
    task_data: KerasTaskData
    graphs_kind: ClassVar[type[Graphs]] = Graphs
    state_kind: ClassVar[type[KerasVariables]] = KerasVariables
    _saving: TensorFlowSaving | None = None

    def __init__(
        self,
        task: Task,
        job: Job | None = None,
        *,
        world: World | None = None,
        report: Callable[..., None] = lambda event, **values: None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_backend()
        world = World.from_environment() if world is None else world
        job = _for_world(job or Job(), world)
        check_task(task, type(task).__name__)
        check_engine(job)
        check_task_limits(task)
        super().__init__(task, job, world, callbacks)
        self.progress = Progress()
        self._schedule = schedule_of(task.schedule, partial(scheduled_steps, self))
        self._poison = 1.0
        self._undo = set_arithmetic(self.job)
        try:
            kind = load(STRATEGIES[TENSORFLOW][self.job.strategy_spec.name])
            self.strategy: TensorFlowStrategy = kind(task, self.job, self.world)
            self.comm = self.strategy.comm
            self.built = build(task, self.job, self.strategy)
            self.strategy.check(self.built)
            self.results = StepResultBuilder(self.job, "rank" if self.comm.size > 1 else "replica")
            self.graphs = self.graphs_kind(
                task, self.built, self.strategy, updates_bad=self.results.updates_bad
            )
            self.written = WrittenVariables(self.built.model)
            self.task_data = KerasTaskData(task, self.job, self.strategy, self.built.model)
            self.faults.corrupt = lambda: flip_one_bit(self.built.model.trainable_variables[0])
            self.faults.poison = self._poison_next
            if self.job.run_dir:
                state, reach = self.state_kind(self.built), self.faults.reach
                self._saving = TensorFlowSaving(
                    task, self.job, self.comm, state, world.attempt, reach, report
                )
            self._ending = StopAgreement(self.comm, lockstep=True)
            self.guard, self._loss_scale = self.results.guard, self.results.loss_scale
            self._callback_states = CallbackStates(self.callbacks, self.comm, digest_of_state)
        except BaseException:
            self._undo()
            raise

    # --- the loop -------------------------------------------------------------------------

    def calls(self) -> Iterator[list[ReplicaBatch]]:
        """The batches that come next, in groups for one call of TensorFlow (`--steps-per-call`).

        A group is cut alike throughout, ends with its epoch, and where the job evaluates or saves.
        """
        group: list[ReplicaBatch] = []
        for batch in self.batches():
            if group and not _alike(batch, group[0]):
                yield group
                group = []
                if self.evaluation_plan.is_over:  # decided while the group was trained
                    return
            group.append(batch)
            if len(group) == self.job.steps_per_call or self._is_due_after(batch):
                yield group
                group = []
        if group:
            yield group

    def _is_due_after(self, batch: ReplicaBatch) -> bool:
        every = [self.job.checkpoint_every]
        if self.job.eval_every.isdecimal():
            every.append(int(self.job.eval_every))
        return any(n is not None and (batch.index + 1) % n == 0 for n in every)

    def step(self, batch: ReplicaBatch) -> StepResult:
        """One optimizer step on one global batch; all ranks call this. Sends what the card says."""
        (result,) = self.steps([batch])
        return result

    def largest_pass(self, batch: ReplicaBatch) -> int:
        """The samples of the largest pass of a replica here through the model for `batch`."""
        passes = (micro for micros in batch.cut.pieces for micro in micros)
        return max((sum(piece.samples for piece in micro) for micro in passes), default=1)

    def steps(self, batches: list[ReplicaBatch]) -> list[StepResult]:
        """Several steps in one call of TensorFlow, on batches that are cut alike."""
        first = batches[0]
        assert all(_alike(batch, first) for batch in batches), "the batches of a call are cut alike"
        self.heartbeat.at_step(first.index)
        self.heartbeat.enter("compute")
        if self.graphs.probe is not None:
            self.graphs.probe.begin(first)
        for batch in batches:
            self.faults.reach("step", batch.index)
        requests = RankRequests(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        says = [self._says(batch, number, requests) for number, batch in enumerate(batches)]
        data = self._fed(batches)
        self.written.before_step()
        self._poison = 1.0
        before = self.heartbeat.enter("exchange") if self.comm.size > 1 else ""
        self.heartbeat.collective()
        sums = self.graphs.run(data, first.cut, says)
        if before:
            self.heartbeat.enter(before)
        self.written.after_step()
        self.user_buffers = self.written.names
        results = [self._judge(b, f) for b, f in zip(batches, sums, strict=True)]
        for batch in batches:
            self.faults.reach("stepped", batch.index)
        return results

    def _says(self, batch: ReplicaBatch, number: int, requests: RankRequests) -> StepInputs:
        rate, update = 0.0, self.progress.updates + number
        if self.graphs.has_schedule:
            assert self.built.made_rate is not None
            rate = self.built.made_rate * float(self._schedule(update))
            rate *= self.evaluation_plan.rate_factor
        return StepInputs(
            key=random_key(self.job.seed, batch.index),
            nominal=batch.nominal,
            rate=rate,
            stop=requests.stop,
            save=requests.save,
            scale=self.results.scale,
            limit=self.results.guard.limit,
            poison=self._poison,
        )

    def _fed(self, batches: list[ReplicaBatch]) -> Any:
        parts: list[Any] = [batch.parts for batch in batches]
        if len(parts) == 1:
            return self.strategy.feed(parts[0])
        return self.strategy.feed(
            [
                tf.nest.map_structure(lambda *rows: tf.stack(rows), *rows_of_replica)
                for rows_of_replica in zip(*parts, strict=True)
            ]
        )

    def _judge(self, batch: ReplicaBatch, sums: StepSums) -> StepResult:
        """What a step has given, judged; the progress moves."""
        result = self.results.result(batch, sums)
        self.progress = self.progress.after(result, batch.epoch, batch.step_in_epoch)
        return result

    def _poison_next(self) -> None:
        self._poison = math.nan

    # --- between the steps ----------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """The metrics over the evaluation data, exact; every rank calls this."""
        before = self.heartbeat.enter("evaluate")
        self.faults.reach("evaluate")
        with around_evaluation(self):
            metrics = self.task_data.evaluate(lambda: self.heartbeat.enter("evaluate"))
        self.heartbeat.enter(before)
        return metrics

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update."""
        self.task_data.rehearse()

    @property
    def model(self) -> Any:
        """The Keras model that is trained, on this rank."""
        return self.built.model

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every variable of the model as an array, by name in sorted order."""
        variables = names_of(self.built.model)
        for name in sorted(variables):
            yield name, value_of(variables[name])

    def close(self) -> None:
        """Leave the other ranks, and give model and process back as they were."""
        if self._saving is not None:
            self._saving.checkpointer.close()
        self.strategy.leave()
        self._give_back()

    def _give_back(self) -> None:
        self.task_data.close()
        restore_layers(self.built.model)
        let_sum_again(self.built.optimizer)
        self._undo()

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is None:
            self.close()
            warn_ignored(self.job, self._called, self.progress)
        else:  # the others need not wait for one that comes no further
            self._give_back()


def _alike(batch: ReplicaBatch, other: ReplicaBatch) -> bool:
    """Whether two batches can go in one call, by what all ranks know of them: sizes, not own parts.

    Of a `tf.data.Dataset` all ranks see the same, so there the lengths of what it pads count too.
    """
    if batch.epoch != other.epoch or batch.sizes != other.sizes:
        return False
    return batch.shapes == other.shapes


def _for_world(job: Job, world: World) -> Job:
    """The job as these ranks run it, its strategy resolved."""
    name = job.strategy or default_strategy(TENSORFLOW, world.size)
    spec = resolved_strategy(name, ranks=world.size, bitwise=job.bitwise)
    ranks = world.size if world.role == TRAINER else job.ranks
    return dataclasses.replace(job, engine=TENSORFLOW, ranks=ranks, strategy=str(spec))
