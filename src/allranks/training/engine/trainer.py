"""What the trainers of all engines have alike: the loop over batches, evaluating, saving, stopping.

An engine derives its trainer from `EngineTrainer`, and says what a step, an evaluation and the
weights are. It saves its own state (`SavedTraining`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from allranks.checkpoint.commit import Ranks
from allranks.errors import PeerLost, RequestError, nearest
from allranks.job.faults import Faults
from allranks.job.job import Job
from allranks.job.limits import until_of
from allranks.job.loss_scale import LossScale
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.strategies.shards import largest_shard, smaller_micro_batch
from allranks.training.callback import Callback
from allranks.training.engine.regroup import Handover
from allranks.training.engine.saved_job import CallbackStates, SavedTraining
from allranks.training.guard import Guard
from allranks.training.progress import Progress, StepResult
from allranks.training.schedules import Plateau, PlateauState
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


# --- evaluating ----------------------------------------------------------------------------------
# After each step: evaluate now? Is it the best so far? Stop early?
#
# All ranks see the same metrics, so all decide alike without a message. Ranks that train apart each
# decide by their own.


class EvaluationPlan:
    """What happens to `job` between its steps. `found` are the metrics of the newest evaluation."""

    def __init__(self, job: Job, plateau: Plateau | None = None) -> None:
        self.job = job
        self.last_metrics: dict[str, float] = {}
        self.found_at = -1
        self.is_best = False
        self._best = Best(job.best) if job.best else None
        self._stop = Best(job.early_stop) if job.early_stop else None
        self._until = until_of(job)
        self.reached_at: int | None = None
        """How many global batches were made when an evaluation first had what `until` asks for."""
        self._plateau = None if plateau is None else PlateauState(plateau)
        self._judges: dict[str, Best | PlateauState | None]
        self._judges = {"best": self._best, "stop": self._stop, "plateau": self._plateau}

    @property
    def rate_factor(self) -> float:
        """What evaluations without a better one have made of the learning rate."""
        return 1.0 if self._plateau is None else self._plateau.factor

    @property
    def is_over(self) -> bool:
        """Whether `until` is reached, or `early_stop` not bettered for `patience` evaluations."""
        if self.reached_at is not None:
            return True
        return self._stop is not None and self._stop.in_vain >= self.job.patience

    def is_due(self, done: Progress, steps_per_epoch: int | None) -> bool:
        """Whether an evaluation follows the step that was made last; a stream knows no length."""
        every = self.job.eval_every
        if not every or done.batch_index == 0:
            return False
        if every == "epoch":
            is_due = done.step_in_epoch == (steps_per_epoch or 0)
        else:
            is_due = done.batch_index % int(every) == 0
        return is_due and done.batch_index != self.found_at

    def take(self, metrics: dict[str, float], done: Progress) -> None:
        """Record the metrics of an evaluation during training."""
        self.last_metrics, self.found_at = metrics, done.batch_index
        judged = {name: judge.take(metrics) for name, judge in self._judges.items() if judge}
        self.is_best = bool(judged.get("best"))
        until = self._until
        reached = until is not None and until.is_reached(metrics.get(until.metric, math.nan))
        if reached and self.reached_at is None:
            self.reached_at = done.batch_index

    def forget(self) -> None:
        """Forget the last metrics: the weights have changed since."""
        self.found_at = -1

    def metrics_of(self, done: Progress) -> dict[str, float] | None:
        """The metrics of the weights as they are now, if they are known."""
        return self.last_metrics if self.found_at == done.batch_index else None

    def wants_save(self, done: Progress) -> bool:
        """Whether the weights as they are now are the best so far, and to be kept."""
        return self.is_best and self.found_at == done.batch_index

    def state(self) -> dict[str, Any]:
        """What later decisions depend on, as plain values."""
        return {
            "found": self.last_metrics,
            "found_at": self.found_at,
            **{name: judge and judge.state() for name, judge in self._judges.items()},
            "until": None if self._until is None else [self.job.until, self.reached_at],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.last_metrics = {name: float(score) for name, score in state["found"].items()}
        self.found_at = int(state["found_at"])
        self.is_best = False
        for name, judge in self._judges.items():
            if judge is not None and state.get(name) is not None:
                judge.load_state(state[name])
        rule, reached_at = state.get("until") or ("", None)
        self.reached_at = None
        if rule == self.job.until and reached_at is not None:
            self.reached_at = int(reached_at)


def check_metrics(job: Job, names: Iterable[str], plateau: Plateau | None = None) -> None:
    """Raise `RequestError` unless an evaluation has the metrics by which the job judges."""
    if plateau is not None and not job.eval_every:
        raise RequestError(
            asked=f"plateau() of the task, by {plateau.rule}",
            found="no --eval-every",
            why="it counts the evaluations on the way",
            do="--eval-every epoch, or --eval-every 100",
        )
    rules = {"--best": job.best, "--early-stop": job.early_stop}
    until, judges = until_of(job), {**rules, "Plateau": plateau.rule if plateau else ""}
    if until is not None:
        judges["--until"] = f"max:{until.metric}"
    for flag, rule in judges.items():
        metric = rule.partition(":")[2]
        if rule and metric not in names:
            raise RequestError(
                asked=f"{flag} {rule}",
                found=f"no metric {metric!r} in the evaluation of this task",
                why="what is judged by is what eval_data() and metrics() of the task give",
                do=nearest(metric, names),
            )


@dataclass
class Best:
    """`rule` is "max:METRIC" or "min:METRIC"; `in_vain` counts values in a row that are no better.

    A value that is not there, or not a number, is never better.
    """

    rule: str
    value: float | None = None
    in_vain: int = 0

    @property
    def metric(self) -> str:
        return self.rule.partition(":")[2]

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Take in the next evaluation; returns whether it is the best so far."""
        value = metrics.get(self.metric, math.nan)
        sign = -1 if self.rule.startswith("min:") else 1
        better = not math.isnan(value) and (self.value is None or sign * value > sign * self.value)
        self.in_vain = 0 if better else self.in_vain + 1
        if better:
            self.value = value
        return better

    def state(self) -> dict[str, Any]:
        """What later decisions depend on, as plain values."""
        return dataclasses.asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned, if it is of the same rule."""
        if state["rule"] == self.rule:
            value = state["value"]
            self.value = None if value is None else float(value)
            self.in_vain = int(state["in_vain"])


# --- evaluation sets -----------------------------------------------------------------------------
# Several sets to evaluate on: `eval_data()` may return a dict from a name to the data of a set.
#
#     {"same": (images, labels), "shifted": ShiftedDigits()}   ->   same/accuracy, shifted/accuracy
#
# A dict of tensors or arrays is one set, whose batches are dicts.


def sets_of(data: Any) -> dict[str, Any]:
    """The sets by their names; one that has no name is under ""; raises `RequestError`."""
    if type(data) is not dict or all(hasattr(value, "shape") for value in data.values()):
        return {"": data}
    wrong = [name for name in data if not isinstance(name, str) or not name or "/" in name]
    arrays = [name for name, value in data.items() if hasattr(value, "shape")]
    if wrong or arrays:
        raise RequestError(
            asked="eval_data() of the task: several sets",
            found=f"the name {wrong[0]!r}" if wrong else f"{arrays[0]!r} is a tensor, others not",
            why="metrics are called NAME/METRIC, and a dict of tensors alone is one set",
            do="give each set a text without / for a name"
            if wrong
            else f"write {{{arrays[0]!r}: (tensor,), …}}",
        )
    return dict(data)


def named(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the set `name` as they are reported."""
    return {f"{name}/{metric}" if name else metric: value for metric, value in metrics.items()}


class Watches(Protocol):
    """Who looks at a training for what must not be saved, and need not look twice."""

    def compare_replicas(self) -> None:
        """Before each save: raise if the replicas differ."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


# --- loops of one's own --------------------------------------------------------------------------
# What goes wrong in a loop of one's own over the batches of a trainer.


def warn_ignored(job: Job, called: Set[str], done: Progress) -> None:
    """Warn of options of a job that a custom training loop has ignored."""
    options: dict[str, dict[str, Any]] = {
        "evaluate_if_due": {
            "eval_every": job.eval_every,
            "early_stop": job.early_stop,
            "until": job.until,
        },
        "save_if_due": {"checkpoint_every": job.checkpoint_every},
    }
    for method, values in options.items():
        ignored = [f"{name}={value!r}" for name, value in values.items() if value]
        if ignored and method not in called and done.batch_index:
            warnings.warn(
                f"Job({', '.join(ignored)}) did nothing in this loop, which never called "
                f"trainer.{method}(…) after a step",
                stacklevel=3,
            )


def nothing_left(limits: Sequence[str], done: Progress) -> RequestError:
    """The error for batches that have been trained already."""
    return RequestError(
        asked=f"batches({', '.join(limits)})",
        found=f"a training that has made {done.batch_index} steps, and is in epoch {done.epoch}",
        why="epochs and steps count from the start of the job, so that one that was stopped ends "
        "where it would have",
        do="one loop over batches() for all of it, or batches(epochs=1), then batches(epochs=2), …",
    )


# --- trainer -------------------------------------------------------------------------------------


class TrainerRanks(Ranks, Protocol):
    """The ranks that train together."""

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...


B = TypeVar("B")


class EngineTrainer(ABC, Generic[B]):
    """One training of a task, step by step, on a rank; `B` is the engine's batch.

    An engine sets the attributes below when it has built the model. `_saving` is `None` without a
    run folder, `_watch` without a witness.
    """

    comm: TrainerRanks
    built: Any
    task_data: Any
    progress: Progress
    model_notes: Sequence[str] = ()
    guard: Guard
    _loss_scale: LossScale | None
    _ending: StopAgreement
    _callback_states: CallbackStates
    _saving: SavedTraining | None = None
    _watch: Watches | None = None

    def __init__(
        self,
        task: TaskFields,
        job: Job,
        world: World,
        callbacks: Sequence[Callback],
        before: Handover | None = None,
    ) -> None:
        """`before`: what the trainer of this process in the last group of its job has left."""
        self.task, self.job, self.world = task, job, world
        self.evaluation_plan = EvaluationPlan(job, task.plateau())
        if before is None:
            self.heartbeat = Heartbeat(world.heartbeat, world.number)
            self.faults = Faults.of(job.inject, world.number, world.restarts)
        else:
            self.heartbeat, self.faults = before.heartbeat, before.faults
        again = [] if before is None else before.callbacks
        self.callbacks = again or [*callbacks, *task.callbacks()]
        self.steps_again = 0 if before is None else before.steps_again
        self.last_result: StepResult | None = None
        self.unheard: tuple[B, StepResult] | None = None  # a step, until the callbacks were called
        self.callbacks_called = 0  # how many of them
        self.user_buffers = list[str]()
        self.in_step = list[B]()  # while `fit` makes a step: its batch
        self._has_given, self._came_to_an_end, self._called = False, True, set[str]()
        self._is_prepared = False

    # --- the loop -------------------------------------------------------------------------

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[B]:
        """This rank's part of the next global batches, up to the end of the training.

        `epochs` and `steps` count from the start of the job; the defaults are the task's epochs
        and the job's steps. Pass each batch to `step` before you request the next.
        """
        limit = self.job.steps if steps is None else steps
        last_epoch = self.task.epochs if epochs is None else epochs
        if limit is not None and epochs is None:
            last_epoch = 2**31  # steps were asked for: epochs do not end them
        limits, gave = [f"{n}={v}" for n, v in (("epochs", epochs), ("steps", steps)) if v], False
        self._callback_states.begin()
        if self._saving is not None:
            self._callback_states.check()
        upcoming = self.task_data.batches.after(self.progress, last_epoch, limit)
        if self._ending.lockstep:
            self.task_data.compare_training()
        while not self.evaluation_plan.is_over:
            if self.heartbeat.group_number != self.world.group:
                self.look_at_group(self.progress.batch_index)
            self.heartbeat.enter("data")
            batch = self._next_batch(upcoming)
            if batch is None:
                if limits and self._has_given and not gave:
                    raise nothing_left(limits, self.progress)
                break
            gave, self._has_given, self._came_to_an_end = True, True, False
            yield batch
        self._came_to_an_end = True
        self._end_batches()

    def look_at_group(self, step: int) -> None:
        """Raise `PeerLost` if other ranks train from `step` on than those of this trainer."""
        if self.heartbeat.has_left(self.world.group, step):
            raise PeerLost(f"group {self.world.group} of the ranks ends before step {step}")

    def _next_batch(self, upcoming: Iterator[B]) -> B | None:
        return next(upcoming, None)

    def _end_batches(self) -> None:
        """No batch follows."""

    def calls(self) -> Iterator[list[B]]:
        """The batches that come next, as the loop `fit` takes them: one at a time."""
        return ([batch] for batch in self.batches())

    @abstractmethod
    def step(self, batch: B) -> StepResult:
        """One optimizer step on one global batch; all ranks call this."""

    def steps(self, batches: list[B]) -> list[StepResult]:
        """Several steps, one after the other."""
        return [self.step(batch) for batch in batches]

    def settle(self) -> None:
        """Read the unread step. Does nothing where each step is read at once."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Any]]:
        """Every weight, whole, by name in sorted order; every rank calls this."""

    @abstractmethod
    def largest_pass(self, batch: B) -> int:
        """The samples of the largest pass of `batch` through the model on this rank."""

    def smaller_micro_batch(self, batch: B) -> int | None:
        """The micro-batch to try if a pass of `batch` runs out of memory, or `None`."""
        largest = largest_shard(self.task.batch_size, self.task.shards)
        return smaller_micro_batch(self.largest_pass(batch), largest, whole=self.job.bitwise)

    # --- evaluation -----------------------------------------------------------------------

    @abstractmethod
    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The metrics over the evaluation data, exact; every rank calls this."""

    def evaluate_if_due(self) -> dict[str, float] | None:
        """After a step: evaluate where the job asks for it; `None` where it does not."""
        self._called.add("evaluate_if_due")
        if not self.evaluation_plan.is_due(self.progress, self.task_data.batches.steps_per_epoch):
            return None
        metrics = self.evaluate()
        self.evaluation_plan.take(metrics, self.progress)
        return metrics

    @property
    def total_steps(self) -> int | None:
        """The optimizer steps of the whole job; `None` where the data does not say its length."""
        per_epoch = self.task_data.batches.steps_per_epoch
        if self.job.steps is not None:
            return self.job.steps
        return None if per_epoch is None else int(per_epoch * self.task.epochs)

    # --- checkpoints ----------------------------------------------------------------------

    def save(self, *, wait: bool = True, evaluate: bool = True) -> bool:
        """Save a checkpoint into the run folder of the job; every rank calls this.

        Training waits for a copy in memory; a thread writes, and with `wait` its end is waited for.
        Returns whether what was waited for is committed: a full disk costs a checkpoint, not the
        training. Where the job keeps the best checkpoint it evaluates first, if `evaluate`.
        """
        self.settle()
        saving, metrics = self._saves(), self.evaluation_plan.metrics_of(self.progress)
        if metrics is None:
            metrics = self.evaluate() if self.job.best and evaluate else {}
        before = self.heartbeat.enter("save")
        for callback in self.callbacks:
            callback.on_save(self)
        if self._watch is not None:
            self._watch.compare_replicas()
        saving.save(self.progress.batch_index, self._other_state(), metrics)
        committed = saving.checkpointer.wait() if wait else True
        self.heartbeat.enter(before)
        return committed

    def resume(self) -> int | None:
        """Resume from the newest good checkpoint; every rank calls this, before the first step.

        That of the job's run folder, else that which the job says to start from. Returns the
        global batches that are done, or `None` where there is no checkpoint. Raises `RequestError`
        if it belongs to another job.
        """
        before = self.heartbeat.enter("save")
        _ = self.task_data.batches  # opening it seeds the streams that the checkpoint brings back
        step = self._saves().load(self._load_other_state)
        self.heartbeat.enter(before)
        return step

    def save_if_due(self, result: StepResult) -> bool:
        """After a step: save where the job or a signal asks for it. Returns whether to stop now.

        Ranks that train apart do not hear of each other's signals with the step, so they agree to
        stop together after the last of the steps that they have reached.
        """
        self._called.add("save_if_due")
        step, every = self.progress.batch_index, self.job.checkpoint_every
        stop = self._ending.should_stop(step, result.asked.stop)
        requested = result.asked.save and self._ending.lockstep
        if requested:
            # another rank may have requested it: not again with the next step
            self.heartbeat.wants_save()
        due = every is not None and step % every == 0
        if stop or requested or due or self.evaluation_plan.wants_save(self.progress):
            self.save(wait=stop, evaluate=not stop)
        elif every is not None and not self._is_prepared:
            self._saves().prepare(self._other_state())
            self._is_prepared = True
        return stop

    def finish(self) -> bool:
        """After the last step: save, where checkpoints are made. Returns whether it is a stop.

        It is one if ranks that train apart were asked to stop before they came to theirs: all ranks
        save then, and all end as stopped.
        """
        self.settle()
        stop = self._ending.rank_finished(self.progress.batch_index)
        if stop or self.job.checkpoint_every is not None:
            self.save(evaluate=not stop)
        return stop

    def _saves(self) -> SavedTraining:
        if self._saving is None:
            raise RequestError(
                asked="to save or resume a training",
                found="no run folder in its job",
                why="checkpoints live in the run folder",
                do='Trainer(task, Job(run_dir="runs/mine"))',
            )
        return self._saving

    def _other_state(self) -> dict[str, Any]:
        """The state of a training that is not the engine's, as plain values."""
        callbacks = {} if self._callback_states.is_empty else self._callback_states.state()
        return {**self.course(), **callbacks}

    def course(self) -> dict[str, Any]:
        """The same without that of callbacks: no communication."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "guard": self.guard.state(),
            "course": self.evaluation_plan.state(),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state(),
            "witness": None if self._watch is None else self._watch.state(),
        }

    def _load_other_state(self, state: dict[str, Any]) -> None:
        """Load what `_other_state` returned."""
        self._callback_states.load_state(state)  # it may refuse: nothing was trained then
        self.load_course(state)

    def load_course(self, state: dict[str, Any]) -> None:
        """Load what `course` returned."""
        self.progress = Progress.of(state["progress"])
        done = self.progress.batch_index
        if state.get("step", done) != done:
            raise ValueError(f"progress.batch_index is {done} after step {state['step']}")
        self.guard.load_state(state["guard"])
        self.evaluation_plan.load_state(state["course"])
        if self._loss_scale is not None:
            self._loss_scale.load_state(state["loss_scale"])
        if self._watch is not None and (testimony := state.get("witness")) is not None:
            self._watch.load_state(testimony)

    # --- the end --------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks, and give model and process back as they were."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None: ...


def scheduled_steps(trainer: EngineTrainer[Any]) -> int | None:
    """`total_steps` by what the data said before any was read: a resume has the same number.

    A comparison of the first steps has the schedule of the whole training.
    """
    job, per_epoch = trainer.job, trainer.task_data.batches.expected_steps
    steps = job.schedule_steps if job.trace else job.steps
    if steps is None and per_epoch is not None:
        return int(per_epoch * trainer.task.epochs)
    return job.steps if steps is None else steps
