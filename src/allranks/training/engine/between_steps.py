"""The work of a trainer between its steps: evaluate and save as the job says, stop, resume.

The trainer of every engine has one, and calls it from its public methods of these names, which
document them for users. Each engine saves its own state (`Saves`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, Self

from allranks.checkpoint.commit import Ranks
from allranks.errors import RequestError
from allranks.job.faults import Faults
from allranks.job.job import Job
from allranks.job.loss_scale import LossScale
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.training.callback import Callback
from allranks.training.engine.saved_job import CallbackStates
from allranks.training.evaluation_plan import EvaluationPlan
from allranks.training.guard import Guard
from allranks.training.progress import Progress, StepResult
from allranks.training.task_fields import TaskFields

# --- stopping ------------------------------------------------------------------------------------
# Agreement on the step after which all ranks stop, if a signal asks them to stop early.
#
# Ranks in lockstep learn with the step that one of them was asked to stop. Ranks that train
# independently do not, so they agree to stop after the last step that any of them has reached.


class StopAgreement:
    """The step after which a rank of `comm` stops; with `lockstep` all ranks step as one."""

    def __init__(self, comm: Ranks, lockstep: bool) -> None:
        self.comm, self.lockstep = comm, lockstep
        self._at: int | None = None

    def should_stop(self, step: int, requested: bool) -> bool:
        """Whether to stop after this step; every rank calls this after each."""
        if self.lockstep:
            return requested
        if requested and self._at is None:
            self._agree(step, requested=True)
        return self._at is not None and step >= self._at

    def rank_finished(self, step: int) -> bool:
        """After the last step of this rank: returns whether it is a stop. Called once by each.

        It is one if independent ranks were asked to stop before their last steps.
        """
        if self.lockstep:
            return False
        return self._at is not None or self._agree(step, requested=False)

    def _agree(self, step: int, requested: bool) -> bool:
        """Agree on the last step; returns whether any rank was asked. Each calls this once."""
        texts = self.comm.gather_texts(json.dumps([step, requested]))
        answers = [json.loads(text) for text in texts]
        self._at = max(reached for reached, _ in answers)
        return any(was_asked for _, was_asked in answers)


class Waits(Protocol):
    """What a save under way is waited for with."""

    def wait(self) -> bool:
        """Wait for the save; returns whether it was committed."""
        ...


class Saves(Protocol):
    """The checkpoints of one training."""

    @property
    def checkpointer(self) -> Waits: ...

    def save(self, step: int, other_state: dict[str, Any], metrics: dict[str, float]) -> None:
        """Save the engine's state, and `other_state` of the training; a thread writes it."""
        ...

    def prepare(self, other_state: dict[str, Any]) -> None:
        """Once, after a step that is not saved: allocate the memory that saves need."""
        ...

    def load(self, load_other_state: Callable[[dict[str, Any]], None]) -> int | None:
        """Load the engine's state, and pass on the other; returns its step, if there is any.

        If either fails, the checkpoint before is tried.
        """
        ...


class Watches(Protocol):
    """Who looks at a training for what must not be saved, and need not look twice."""

    def compare_replicas(self) -> None:
        """Before each save: raise if the replicas differ."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class BetweenSteps:
    """The work between the steps of one training; `saving` is `None` without a run folder."""

    def __init__(
        self,
        saving: Saves | None,
        ending: StopAgreement,
        guard: Guard,
        loss_scale: LossScale | None,
        callback_states: CallbackStates,
        watch: Watches | None = None,
    ) -> None:
        self._saving, self._ending, self._watch = saving, ending, watch
        self._callback_states = callback_states
        self._guard, self._loss_scale = guard, loss_scale
        self._is_prepared = False

    @property
    def saving(self) -> Saves:
        """The checkpoints; raises `RequestError` if there is no run folder."""
        if self._saving is None:
            raise RequestError(
                asked="to save or resume a training",
                found="no run folder in its job",
                why="checkpoints live in the run folder",
                do='Trainer(task, Job(run_dir="runs/mine"))',
            )
        return self._saving

    def begin(self) -> None:
        """Before the first step: load and check the states of callbacks."""
        self._callback_states.begin()
        if self._saving is not None:
            self._callback_states.check()

    def evaluate_if_due(self, trainer: EngineTrainer) -> dict[str, float] | None:
        """Evaluate if the job asks for it after the last step; returns the metrics."""
        per_epoch = trainer.task_data.batches.steps_per_epoch
        if not trainer.evaluation_plan.is_due(trainer.progress, per_epoch):
            return None
        metrics = trainer.evaluate()
        trainer.evaluation_plan.take(metrics, trainer.progress)
        return metrics

    def save(self, trainer: EngineTrainer, *, wait: bool, evaluate: bool) -> bool:
        """Save, after an evaluation if the best is kept; returns whether the save is committed."""
        saving, metrics = self.saving, trainer.evaluation_plan.metrics_of(trainer.progress)
        if metrics is None:
            metrics = trainer.evaluate() if trainer.job.best and evaluate else {}
        before = trainer.heartbeat.enter("save")
        for callback in trainer.callbacks:
            callback.on_save(trainer)
        if self._watch is not None:
            self._watch.compare_replicas()
        saving.save(trainer.progress.batch_index, self.other_state(trainer), metrics)
        committed = saving.checkpointer.wait() if wait else True
        trainer.heartbeat.enter(before)
        return committed

    def resume(self, trainer: EngineTrainer) -> int | None:
        """Resume from the newest good checkpoint; returns the number of its global batches."""
        before = trainer.heartbeat.enter("save")
        _ = (
            trainer.task_data.batches
        )  # opening it seeds the streams that the checkpoint brings back
        step = self.saving.load(partial(self.load_other_state, trainer))
        trainer.heartbeat.enter(before)
        return step

    def save_if_due(self, trainer: EngineTrainer, result: StepResult) -> bool:
        """Save if the job or a signal asks for it after this step; returns whether to stop."""
        step, every = trainer.progress.batch_index, trainer.job.checkpoint_every
        stop = self._ending.should_stop(step, result.asked.stop)
        requested = result.asked.save and self._ending.lockstep
        if requested:
            # another rank may have requested it: not again with the next step
            trainer.heartbeat.wants_save()
        due = every is not None and step % every == 0
        if stop or requested or due or trainer.evaluation_plan.wants_save(trainer.progress):
            trainer.save(wait=stop, evaluate=not stop)
        elif every is not None and not self._is_prepared:
            self.saving.prepare(self.other_state(trainer))
            self._is_prepared = True
        return stop

    def finish(self, trainer: EngineTrainer) -> bool:
        """Save after the last step, if there are checkpoints; returns whether it is a stop."""
        stop = self._ending.rank_finished(trainer.progress.batch_index)
        if stop or trainer.job.checkpoint_every is not None:
            trainer.save(evaluate=not stop)
        return stop

    def other_state(self, trainer: EngineTrainer) -> dict[str, Any]:
        """The state of a training that is not the engine's, as plain values."""
        return {
            "progress": dataclasses.asdict(trainer.progress),
            "guard": self._guard.state(),
            "course": trainer.evaluation_plan.state(),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state(),
            "witness": None if self._watch is None else self._watch.state(),
            **self._callback_states.state(),
        }

    def load_other_state(self, trainer: EngineTrainer, state: dict[str, Any]) -> None:
        """Load what `other_state` returned."""
        self._callback_states.load_state(state)  # it may refuse: nothing was trained then
        trainer.progress = Progress.of(state["progress"])
        done = trainer.progress.batch_index
        if state.get("step", done) != done:
            raise ValueError(f"progress.batch_index is {done} after step {state['step']}")
        self._guard.load_state(state["guard"])
        trainer.evaluation_plan.load_state(state["course"])
        if self._loss_scale is not None:
            self._loss_scale.load_state(state["loss_scale"])
        if self._watch is not None and (testimony := state.get("witness")) is not None:
            self._watch.load_state(testimony)


def total_steps(trainer: EngineTrainer) -> int | None:
    """The optimizer steps of the whole job; `None` where nobody knows how long an epoch is."""
    per_epoch = trainer.task_data.batches.steps_per_epoch
    if trainer.job.steps is not None:
        return trainer.job.steps
    return None if per_epoch is None else int(per_epoch * trainer.task.epochs)


def scheduled_steps(trainer: EngineTrainer) -> int | None:
    """`total_steps` by what the data said before any was read: a resume has the same number.

    A comparison of the first steps has the schedule of the whole training.
    """
    job, per_epoch = trainer.job, trainer.task_data.batches.expected_steps
    steps = job.schedule_steps if job.trace else job.steps
    if steps is None and per_epoch is not None:
        return int(per_epoch * trainer.task.epochs)
    return job.steps if steps is None else steps


# --- trainer -------------------------------------------------------------------------------------
# The protocol of every engine's trainer, for the shared loop and the shared rank program.
#
# An engine writes its own class; nothing derives from this. The public names mean in each what its
# docstrings say: see the `EngineTrainer` of `allranks.torch`.


class TrainerRanks(Ranks, Protocol):
    """The ranks that train together."""

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...


class Loop(Protocol):
    """What a training loop needs; one call is one step, or several that an engine fuses."""

    @property
    def callbacks(self) -> Sequence[Callback]: ...

    def calls(self) -> Iterator[list[Any]]:
        """The batches that come next, in groups for one call."""
        ...

    def steps(self, batches: list[Any]) -> list[StepResult]:
        """The steps of one call."""
        ...

    def evaluate_if_due(self) -> dict[str, float] | None: ...

    def save_if_due(self, result: StepResult) -> bool: ...

    def finish(self) -> bool: ...


class EngineTrainer(Loop, Protocol):
    """What the program of a rank needs besides, from `rehearse` to `close`.

    `weights` gives all of them by name in sorted order, each with its `nbytes`;
    every rank calls it.
    """

    progress: Progress

    @property
    def job(self) -> Job: ...
    @property
    def task(self) -> TaskFields: ...
    @property
    def world(self) -> World: ...
    @property
    def comm(self) -> TrainerRanks: ...
    @property
    def evaluation_plan(self) -> EvaluationPlan: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def faults(self) -> Faults: ...
    @property
    def built(self) -> Any: ...
    @property
    def task_data(self) -> Any: ...
    @property
    def model_notes(self) -> Sequence[str]: ...
    @property
    def user_buffers(self) -> list[str]: ...
    @property
    def total_steps(self) -> int | None: ...

    def rehearse(self) -> None: ...

    def resume(self) -> int | None: ...

    def evaluate(self) -> dict[str, float]: ...

    def weights(self) -> Iterator[tuple[str, Any]]: ...

    def save(self, *, wait: bool = True, evaluate: bool = True) -> bool: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None: ...
