"""The program of one rank: a job comes in, a record goes out. Started by the launcher, by name.

`describe` loads the task and records what a place must know of it; `main` trains; `place` sets the
rank up as `main` does, and records its tensors. A failure is written as an event before the process
exits, so that the supervisor can tell which rank failed first. An engine derives from `RankProgram`
and defines how it loads a task, its trainer, and its figures.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from allranks.errors import AllranksError, PeerLost
from allranks.job.config import threads_per_rank
from allranks.job.faults import on_no_rank
from allranks.job.job import Job
from allranks.job.limits import elastic_range
from allranks.job.place import Placed, write_placement
from allranks.job.program import Reads, program_facts
from allranks.job.run_folder import JsonLines, rank_events_path
from allranks.launcher.heartbeat import Group
from allranks.launcher.processes.process import exit_code_of, failure_of
from allranks.launcher.world import World
from allranks.training.callback import Callback
from allranks.training.engine.regroup import (
    Agreed,
    Handover,
    Receiver,
    TrainsNoMore,
    first_group,
    next_group,
)
from allranks.training.engine.saved_job import check_ends_later
from allranks.training.engine.trainer import EngineTrainer
from allranks.training.progress import StepResult
from allranks.training.record.digests import RunDigests, StateDigester
from allranks.training.record.logs import Keeping, check_logs
from allranks.training.record.phases import held_at_most
from allranks.training.record.rank_record import RankRecord
from allranks.training.task_fields import TaskFields, task_shape

# --- fit -----------------------------------------------------------------------------------------
# The loop of `allranks train`, from the first step to the last.
#
# A custom loop may leave out calls that it does not need; every call here is public.


def fit(
    trainer: EngineTrainer[Any],
    *,
    goes_on: bool = False,
    has_ended: bool = False,
    digests: RunDigests | None = None,
) -> bool:
    """The loop of `allranks train`; returns False if it was asked to stop before the end.

    With `goes_on` it began in another group of ranks, and what follows a step may be due still;
    with `has_ended` callbacks were told the end there. `digests` are written on the way.
    """
    is_stopped = False
    if goes_on:
        done = trainer.progress
        nothing = StepResult(
            batch_index=done.batch_index - 1,
            epoch=done.epoch,
            loss=math.nan,
            samples=0,
            weight=0.0,
            learning_rate=0.0,
            updated=False,
        )
        is_stopped = _follow_step(trainer, nothing, digests)
    else:
        for callback in trainer.callbacks:
            callback.on_start(trainer)
    finished = not is_stopped and _fit(trainer, digests)
    for callback in () if has_ended else trainer.callbacks:
        callback.on_end(trainer)
    return finished


def _fit(trainer: EngineTrainer[Any], digests: RunDigests | None) -> bool:
    callbacks = trainer.callbacks
    for batches in trainer.calls():
        if digests is not None:
            digests.before_step(batches[-1])
        trainer.in_step = batches[:1]
        results = trainer.steps(batches)
        trainer.in_step = []
        for batch, result in zip(batches, results, strict=True):
            if result.taken:
                for callback in callbacks:
                    callback.on_step(trainer, batch, result)
                    trainer.callbacks_called += 1
        trainer.unheard = None
        if _follow_step(trainer, results[-1], digests):
            return False
    if digests is not None:
        digests.end()
    return not trainer.finish()


def _follow_step(
    trainer: EngineTrainer[Any], result: StepResult, digests: RunDigests | None
) -> bool:
    """Evaluate, digest and save after a step, where that is due; returns whether to stop."""
    metrics = trainer.evaluate_if_due()
    if metrics is not None:
        for callback in trainer.callbacks:
            callback.on_evaluation(trainer, metrics)
    if digests is not None:
        digests.after_step()
    return trainer.save_if_due(result)


DIGEST_LIMIT_BYTES = 16 * 2**30

T = TypeVar("T", bound=EngineTrainer[Any])
Role = Callable[[Job, World, JsonLines], None]
FactsOf = Callable[[Job], dict[str, Any]]


class RankProgram(ABC, Generic[T]):
    """One rank of `job`. A worker of an engine names `describe`, `main` and `place` of its own."""

    roles: ClassVar[Mapping[str, Role]] = {}
    """What runs in a process that has another role than to train."""

    def __init__(self, job: Job, world: World, events: JsonLines) -> None:
        self.job, self.world = job, world
        self.record = RankRecord(job, world, events)
        self.trainer: T | None = None
        self.reads = Reads() if job.brief else None

    # --- what an engine writes ------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def load_task(job: Job) -> TaskFields:
        """The task of a job with its fields set; raises `RequestError`."""

    @staticmethod
    def check_machine(job: Job) -> None:
        """Raise `RequestError` where this node lacks what the ranks of `job` need."""

    @staticmethod
    @abstractmethod
    def set_threads(threads: int, /) -> None:
        """Compute with so many threads."""

    @staticmethod
    @abstractmethod
    def facts(job: Job) -> dict[str, Any]:
        """What decides which bits come out, beside the job."""

    @staticmethod
    def root_cause(error: BaseException) -> BaseException:
        """The error that `error` is about."""
        return error

    @abstractmethod
    def make_trainer(self, task: Any, **more: Any) -> T:
        """The trainer of `task`; `more` are `report` and `callbacks`, where it is to train."""

    def callbacks(self) -> list[Callback]:
        """Who hears of the steps before the callbacks of the task."""
        return [self.record]

    @abstractmethod
    def placement(self, trainer: T) -> Iterable[Placed]:
        """What this rank holds once it has made an update; the trainer trains no more."""

    @abstractmethod
    def save_weights(self, trainer: T, keeping: Keeping) -> None:
        """Keep the files of weights of a training that came to its end; every rank calls this."""

    @staticmethod
    @abstractmethod
    def sha256(weights: Iterator[tuple[str, Any]]) -> str:
        """The digest of all weights, as `trainer.weights` gives them."""

    @abstractmethod
    def figures(self, trainer: T, samples_per_s: float | None) -> dict[str, Any]:
        """What this engine adds to the summary, or knows of it."""

    def leave_group(self, trainer: T, *, planned: bool) -> Handover:
        """Close a trainer whose group trains no more; returns what the next one goes on with."""
        raise NotImplementedError

    @staticmethod
    def take_over(trainer: T, before: Handover | None) -> Agreed:
        """Bring the ranks of a new group to one state; every rank calls this."""
        raise NotImplementedError

    @staticmethod
    def compare(trainer: T, agreed: Agreed) -> None:
        """Raise an error unless they have it; every rank calls this."""
        raise NotImplementedError

    @staticmethod
    def make_room(trainer: T) -> None:
        """Allocate what a new rank is going to receive, before the others wait for it."""
        raise NotImplementedError

    def receiver(self, trainer: T, before: Handover) -> Receiver:
        """What receives the state of a new rank while the others train; its trainer is closed."""
        raise NotImplementedError

    def digester(self, trainer: T) -> StateDigester | None:
        """What digests the state on the way; `None` for an engine that has nothing."""
        return None

    def device_peak_bytes(self, trainer: T) -> int | None:
        """The most that this process has held on its device; `None` where nobody counts."""
        return None

    # --- what all share -------------------------------------------------------------------

    @classmethod
    def describe(cls, argument: dict[str, Any]) -> int:
        """Load the task and write the event `described`, or `failed`."""

        def shape(job: Job) -> dict[str, Any]:
            task = cls.load_task(job)
            cls.check_machine(job)
            check_logs(job)
            return {"shape": task_shape(task)}

        return cls._write_event(argument, "described", shape)

    @staticmethod
    def weight_bytes(task: Any) -> int | None:
        """What the weights and buffers of a task take in float64; `None` where nobody can say."""
        return None

    @classmethod
    def weigh(cls, argument: dict[str, Any]) -> int:
        """Write the event `weighed`: the size of the model, and the files it was loaded from."""

        def weighed(job: Job) -> dict[str, Any]:
            size = cls.weight_bytes(cls.load_task(job))
            return {"weight_bytes": size, "program": program_facts(job.program)}

        return cls._write_event(argument, "weighed", weighed)

    @staticmethod
    def _write_event(argument: dict[str, Any], event: str, facts_of: FactsOf) -> int:
        """Write an event with the facts of the job, or `failed`."""
        job = Job.from_data(argument)
        with JsonLines(rank_events_path(Path(job.run_dir), 0)) as events:
            try:
                events.event(event, **facts_of(job))
            except AllranksError as error:
                events.event("failed", **failure_of(error, 0, None))
                return error.exit_code
        return 0

    @classmethod
    def main(cls, argument: dict[str, Any]) -> int:
        """Train as one rank, or do what its role is; returns the exit code of the process."""
        return cls._run(argument, cls._act)

    @classmethod
    def place(cls, argument: dict[str, Any]) -> int:
        """Set this rank up, write what it will hold once it has made an update, and leave."""
        return cls._run(argument, cls._place)

    @classmethod
    def _run(cls, argument: dict[str, Any], act: Callable[[Self], None]) -> int:
        job, world = Job.from_data(argument), World.from_environment()
        cls.set_threads(threads_per_rank(job, world.on_machine or world.local_size))
        path = rank_events_path(Path(job.run_dir), world.number)
        with JsonLines(path, attempt=world.attempt) as events:
            run = cls(job, world, events)
            try:
                act(run)
            except BaseException as error:
                cause, trainer = cls.root_cause(error), run.trainer
                step = trainer.progress.batch_index if trainer else None
                updates = trainer.progress.updates_unless_bad if trainer else 0
                updates -= run.record.updates_before  # without those it was resumed with
                failure = failure_of(cause, updates, step)
                if trainer and trainer.in_step and job.micro_batch_trial:
                    failure["smaller"] = trainer.smaller_micro_batch(trainer.in_step[0])
                events.event("failed", **failure)
                run.record.fail()
                return exit_code_of(cause)
        return 0

    def _act(self) -> None:
        role = self.roles.get(self.world.role)
        if role is None:
            self.train()
        else:
            role(self.job, self.world, self.record.events)
            self.record.events.event("held", memory=held_at_most().to_data())

    def _place(self) -> None:
        with self.make_trainer(self.load_task(self.job)) as trainer:
            write_placement(self.record.run_dir, self.world.rank, self.placement(trainer))
            trainer.comm.barrier()

    def _set_up(self) -> tuple[Any, T]:
        """The task and its trainer; writes the event `ready`."""
        report, task = self.record.events.event, self.load_task(self.job)
        trainer = self.trainer = self.make_trainer(task, report=report, callbacks=self.callbacks())
        self._digest(trainer)
        report(
            "ready",
            host=socket.gethostname(),
            swapped=trainer.built.swapped,
            not_pretrained=trainer.built.not_pretrained,
            machine=self.facts(self.job),
        )
        return task, trainer

    def _digest(self, trainer: T) -> None:
        """Let the state of this trainer be digested on the way."""
        digester = self.digester(trainer)
        wanted = digester is not None and RunDigests.are_wanted(self.job, self.world.role)
        self.record.digests = None
        if wanted:
            assert digester is not None
            self.record.digests = RunDigests(self.job, trainer, digester, self.record.digest_log())

    def train(self) -> None:
        """From the job to the event `done` with its summary, or `stopped` with its checkpoint.

        In an elastic job also `left`, where this rank was asked to leave.
        """
        is_new = self.world.group < 0
        task = self._join() if is_new else self._begin()
        self.finish(task, goes_on=is_new and not self._loads_state)

    def _begin(self) -> Any:
        """Make the trainer, up to its first step; returns the task."""
        report, leads = self.record.events.event, self.world.is_leader
        task, trainer = self._set_up()
        if trainer.model_notes and leads:
            report("model_notes", notes=trainer.model_notes)
        trainer.rehearse()
        if trainer.task_data.notes and leads:
            report("data_notes", notes=trainer.task_data.notes)
        resumed_from = trainer.resume()
        self.record.updates_before = trainer.progress.updates
        check_ends_later(self.job, trainer.progress.batch_index, trainer.total_steps)
        self.record.open(trainer, resumed_from)
        trainer.comm.barrier()
        trainer.faults.reach("start")
        self.record.begin()
        if self.record.digests is not None:
            self.record.digests.begin()
        self._tell_reads()  # a first check may run out of time before the end
        return task

    def finish(self, task: Any, *, goes_on: bool = False) -> None:
        """Train to the end, in another group of ranks where this one ends (`regroup`)."""
        has_ended = False
        while True:
            trainer = self.trainer
            assert trainer is not None
            if self.world.group > 0:
                gc.collect()  # trainers before are cycles, with memory, threads and sockets
            try:
                begun: dict[str, Any] = {"goes_on": goes_on, "has_ended": has_ended}
                is_whole = fit(trainer, **begun, digests=self.record.digests)
                has_ended = not self._loads_state
                if is_whole:
                    self._conclude(trainer)
                else:
                    self._stop(trainer)
                return
            except PeerLost as error:
                if not self.job.elastic:
                    raise
                try:
                    self._regroup(task, trainer, error)
                    goes_on = not self._loads_state
                except TrainsNoMore:
                    self._leave()
                    return

    def _join(self) -> Any:
        """Set all up while the others train, and join the next group with this rank; the task."""
        world = self.world
        self.record.events.event("joins", host=socket.gethostname())
        self.world = dataclasses.replace(world, rank=0, size=1)
        task, trainer = self._set_up()
        trainer.rehearse()
        self.make_room(trainer)
        trainer.faults.reach("start")
        trainer.faults.reached.update(trainer.faults.faults)  # its number may have had them before
        before = self.leave_group(trainer, planned=False)
        self.world, receiver = world, self.receiver(trainer, before)
        size = receiver.state_bytes
        self.record.events.event("joining", data=before.data.facts, state_bytes=size)
        group = first_group(trainer.heartbeat, world, receiver)
        before = dataclasses.replace(before, is_new=True, joins=True, streamed=receiver.step)
        trainer = self._meet(task, before, group, -1)
        self.record.join(trainer)
        if not self._loads_state:
            for callback in trainer.callbacks:
                callback.on_start(trainer)
        return task

    @property
    def _loads_state(self) -> bool:
        """Whether another group loads a checkpoint, and so begins as after a restart."""
        return self.job.strategy_spec.card.agreement.cuts_state

    def _leave(self) -> None:
        """End well: the others train on without this rank."""
        assert self.trainer is not None
        trainer, planned = self.trainer, self.trainer.heartbeat.group().from_step >= 0
        self.leave_group(trainer, planned=planned)
        self.record.leave()
        step = trainer.progress.batch_index
        self.record.events.event("left", step=step, memory=self._held(trainer))
        trainer.heartbeat.enter("done")

    def _regroup(self, task: Any, trainer: T, error: PeerLost) -> None:
        """Make the trainer of this rank in the next group."""
        heartbeat, reached = trainer.heartbeat, trainer.progress.batch_index
        step = max(reached, heartbeat.step)
        group = next_group(heartbeat, self.world, step, error)
        before = self.leave_group(trainer, planned=group.from_step >= 0)
        self._meet(task, before, group, step)

    def _meet(self, task: Any, before: Handover, group: Group, step: int) -> T:
        """Meet the others of `group`, which may change while it forms; the trainer in it."""
        while True:
            self.world, agreed = self.world.in_group(group), None
            before.heartbeat.enter_group(group.number)
            try:
                before.faults.reach("regroup", max(before.step, 0))
                hear: dict[str, Any] = {"report": self.record.events.event, "before": before}
                hear["callbacks"] = self.callbacks()
                trainer = self.trainer = self.make_trainer(task, **hear)
                agreed = self.take_over(trainer, before)
                if agreed.compares:
                    self.compare(trainer, agreed)
                break
            except PeerLost as lost:
                group = next_group(before.heartbeat, self.world, step, lost)
                assert self.trainer is not None
                now = self.leave_group(self.trainer, planned=False)
                before = before if agreed is None else before.after(agreed, now)
        trainer.steps_again = agreed.again_before + agreed.steps_again
        self.record.follow_group(trainer, self.world, group, agreed)
        self._digest(trainer)
        if before.unheard is not None and before.step == agreed.position.step:
            for callback in trainer.callbacks[before.callbacks_called :]:
                callback.on_step(trainer, *before.unheard)
        return trainer

    def _conclude(self, trainer: T) -> None:
        if not self.job.brief:
            self.save_weights(trainer, self.record.keeping)
        evaluation = trainer.evaluate()
        self.record.close("done")
        size = sum(tensor.nbytes for _, tensor in trainer.weights())
        digest = self.sha256(trainer.weights()) if size <= DIGEST_LIMIT_BYTES else None
        summary = self.record.summary(trainer, evaluation, digest)
        summary |= self.figures(trainer, summary["samples_per_s"])
        texts = trainer.faults.never_due()
        if self.world.is_leader:
            most = elastic_range(self.job)[1] if self.job.elastic else 0
            texts += on_no_rank(self.job.inject, most or self.job.strategy_spec.process_set.size)
        for text in texts:
            self.record.events.event("never_due", text=text)
        trainer.comm.barrier()
        trainer.close()
        self._tell_reads()
        seconds, memory = trainer.heartbeat.seconds, self._held(trainer)
        self.record.events.event("done", summary=summary, seconds=seconds, memory=memory)
        trainer.heartbeat.enter("done")
        trainer.faults.reach("done")

    def _tell_reads(self) -> None:
        """Write down which files the program has read so far, for a first check."""
        if self.reads is not None:
            self.record.events.event("read", files=self.reads.files())

    def _stop(self, trainer: T) -> None:
        """End after a request to stop; the checkpoint is committed, or could not be."""
        self.record.close("stopped")
        committed = trainer.save(evaluate=False)  # the same step: known to all, not written again
        trainer.comm.barrier()
        trainer.close()
        step = trainer.progress.batch_index
        memory = self._held(trainer)
        self.record.events.event("stopped", step=step, checkpoint=committed, memory=memory)
        trainer.heartbeat.enter("done")

    def _held(self, trainer: T) -> dict[str, int | None]:
        return held_at_most(self.device_peak_bytes(trainer)).to_data()
