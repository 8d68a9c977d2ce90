"""What a trainer does between its steps: evaluate and save where the job asks for it, stop, go on.

The trainer of every engine has one, and hands itself in from its public methods of these names;
what each means to a user is said there. How a state is put away is the engine's (`Saves`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from allranks.checkpoint.commit import Ranks
from allranks.errors import RequestError
from allranks.job.loss_scale import LossScale
from allranks.training.engine.saved_job import CallbackStates
from allranks.training.engine.trainer import EngineTrainer
from allranks.training.guard import Guard
from allranks.training.progress import Progress, StepResult

# --- stopping ------------------------------------------------------------------------------------
# When the ranks of a job stop that were asked to, before the training is at its end.
#
# Ranks that step together hear with the step that one of them was asked to stop. Ranks that train
# apart do not, so they agree to stop together after the last of the steps that they have reached.


class StopAgreement:
    """Where the steps of a rank of `comm` end; with `together` all ranks step as one."""

    def __init__(self, comm: Ranks, together: bool) -> None:
        self.comm, self.together = comm, together
        self._at: int | None = None

    def should_stop(self, step: int, asked: bool) -> bool:
        """Whether to stop after this step; every rank calls this after each."""
        if self.together:
            return asked
        if asked and self._at is None:
            self._meet(step, asked=True)
        return self._at is not None and step >= self._at

    def rank_finished(self, step: int) -> bool:
        """This rank has no step left. Returns whether it is a stop; every rank calls this once.

        It is one if ranks that train apart were asked to stop before they came to their ends.
        """
        if self.together:
            return False
        return self._at is not None or self._meet(step, asked=False)

    def _meet(self, step: int, asked: bool) -> bool:
        """Agree on the last step; returns whether any rank was asked. Each calls this once."""
        said = [json.loads(text) for text in self.comm.gather_texts(json.dumps([step, asked]))]
        self._at = max(reached for reached, _ in said)
        return any(was_asked for _, was_asked in said)


class Waits(Protocol):
    """What a save under way is waited for with."""

    def wait(self) -> bool:
        """Return when it is over: whether it was committed."""
        ...


class Saves(Protocol):
    """The checkpoints of one training."""

    @property
    def checkpointer(self) -> Waits: ...

    def save(self, step: int, rest: dict[str, Any], metrics: dict[str, float]) -> None:
        """Save what the engine holds, and the `rest` of the training; a thread goes on with it."""
        ...

    def prepare(self, rest: dict[str, Any]) -> None:
        """Once, after a step that is not saved: take the memory that saves need."""
        ...

    def load(self, load_rest: Callable[[dict[str, Any]], None]) -> int | None:
        """Take up what the engine holds, and hand on the rest; returns its step, if there is any.

        Where either fails, the checkpoint before is tried.
        """
        ...


class Watches(Protocol):
    """Who looks at a training for what must not be saved, and need not look twice."""

    def compare_replicas(self) -> None:
        """Before each save: raise for what must not be saved."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class BetweenSteps:
    """What is done between the steps of one training; `saving` is `None` without a run folder."""

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
        """The checkpoints; raises `RequestError` where they have no folder."""
        if self._saving is None:
            raise RequestError(
                asked="to save or resume a training",
                found="no run folder in its job",
                why="checkpoints live in the run folder",
                do='Trainer(task, Job(run_dir="runs/mine"))',
            )
        return self._saving

    def begin(self) -> None:
        """Steps follow: callbacks go on from their states, which can be saved."""
        self._callback_states.begin()
        if self._saving is not None:
            self._callback_states.check()

    def evaluate_if_due(self, trainer: EngineTrainer) -> dict[str, float] | None:
        """The metrics, where the job asks for an evaluation after the step that was made last."""
        per_epoch = trainer.task_data.batches.steps_per_epoch
        if not trainer.evaluation_plan.is_due(trainer.progress, per_epoch):
            return None
        metrics = trainer.evaluate()
        trainer.evaluation_plan.take(metrics, trainer.progress)
        return metrics

    def save(self, trainer: EngineTrainer, *, wait: bool, evaluate: bool) -> bool:
        """Save, after an evaluation if the best is kept; whether what it waited for stands."""
        saving, metrics = self.saving, trainer.evaluation_plan.metrics_of(trainer.progress)
        if metrics is None:
            metrics = trainer.evaluate() if trainer.job.best and evaluate else {}
        before = trainer.heartbeat.enter("save")
        for callback in trainer.callbacks:
            callback.on_save(trainer)
        if self._watch is not None:
            self._watch.compare_replicas()
        saving.save(trainer.progress.batch_index, self.rest(trainer), metrics)
        committed = saving.checkpointer.wait() if wait else True
        trainer.heartbeat.enter(before)
        return committed

    def resume(self, trainer: EngineTrainer) -> int | None:
        """Resume from the newest good checkpoint: how many global batches are done with it."""
        before = trainer.heartbeat.enter("save")
        _ = (
            trainer.task_data.batches
        )  # opening it seeds the streams that the checkpoint brings back
        step = self.saving.load(partial(self.load_rest, trainer))
        trainer.heartbeat.enter(before)
        return step

    def save_if_due(self, trainer: EngineTrainer, result: StepResult) -> bool:
        """Save where the job or a signal asks for it after this step. Whether to stop now."""
        step, every = trainer.progress.batch_index, trainer.job.checkpoint_every
        stop = self._ending.should_stop(step, result.asked.stop)
        asked = result.asked.save and self._ending.together
        if asked:
            # heard from another rank first: not again with the next step
            trainer.heartbeat.wants_save()
        due = every is not None and step % every == 0
        if stop or asked or due or trainer.evaluation_plan.wants_save(trainer.progress):
            trainer.save(wait=stop, evaluate=not stop)
        elif every is not None and not self._is_prepared:
            self.saving.prepare(self.rest(trainer))
            self._is_prepared = True
        return stop

    def finish(self, trainer: EngineTrainer) -> bool:
        """Save after the last step, where checkpoints are made. Whether it is a stop."""
        stop = self._ending.rank_finished(trainer.progress.batch_index)
        if stop or trainer.job.checkpoint_every is not None:
            trainer.save(evaluate=not stop)
        return stop

    def rest(self, trainer: EngineTrainer) -> dict[str, Any]:
        """What of the state of a training is not the engine's, as plain values."""
        return {
            "progress": dataclasses.asdict(trainer.progress),
            "guard": self._guard.state(),
            "course": trainer.evaluation_plan.state(),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state(),
            "witness": None if self._watch is None else self._watch.state(),
            **self._callback_states.state(),
        }

    def load_rest(self, trainer: EngineTrainer, state: dict[str, Any]) -> None:
        """Take up what `rest` returned."""
        self._callback_states.load_state(state)  # it may refuse: nothing was trained then
        trainer.progress = Progress.of(state["progress"])
        done = trainer.progress.batch_index
        if state.get("step", done) != done:
            raise ValueError(f"progress.batch_index is {done} after step {state['step']}")
        self._guard.load_state(state["guard"])
        trainer.evaluation_plan.load_state(state["course"])
        if self._loss_scale is not None:
            self._loss_scale.load_state(state["loss_scale"])
        if self._watch is not None and (seen := state.get("witness")) is not None:
            self._watch.load_state(seen)


def total_steps(trainer: EngineTrainer) -> int | None:
    """The optimizer steps of the whole job; `None` where nobody knows how long an epoch is."""
    per_epoch = trainer.task_data.batches.steps_per_epoch
    if trainer.job.steps is not None:
        return trainer.job.steps
    return None if per_epoch is None else int(per_epoch * trainer.task.epochs)
