"""The attempts of one job: start its ranks, and restart them after a transient fault.

Every attempt has its own rendezvous file, so it sees nothing of the attempt before. Every rank
starts from the newest good checkpoint, or from the beginning if there is none.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from allranks.checkpoint.folder import candidates, step_of
from allranks.errors import (
    AllranksError,
    ComputesWrongly,
    FaultKind,
    Interrupted,
    PlaceError,
    ProgramError,
    ReplicasDiffer,
    RequestError,
    Stopped,
    stopped_by,
)
from allranks.job.limits import elastic_range
from allranks.job.resume import CHECKPOINTS, checkpoint_folders, how_to_resume, resume_command
from allranks.job.run_folder import RunFolder, rank_log_path
from allranks.job.scaling import Bounds
from allranks.launcher.fault_report import (
    RankFault,
    describe_cause,
    ended_well,
    events_of,
    first_fault,
    hang_report,
    last_failure,
    last_words,
    rank_to_blame,
    skipped_collective,
    user_error,
)
from allranks.launcher.heartbeat import Beat, HeartbeatTable, Stragglers
from allranks.launcher.plan import STORE, LaunchPlan, RankPlan, Resources
from allranks.launcher.processes.fork_server import HEARTBEAT_FD, LISTENER_FD, SEGMENT_FD
from allranks.launcher.processes.linux import Kills
from allranks.launcher.processes.process import Exit, Process
from allranks.launcher.same_program import SamePrograms
from allranks.launcher.scaling import Scaling
from allranks.launcher.supervisor import COMMIT_S, NEVER, Ended, Signals, WatchPolicy, supervise
from allranks.strategies.roles import LEADER, Role


@dataclass
class Rejoining:
    """How often processes were restarted while the others went on, as their roles allow.

    They are learners that rejoin, or a leader that loads its checkpoint while the others wait. A
    process whose error would repeat is not restarted.
    """

    faults: int = 0
    """Of processes that resume: failures that were not caused by a peer."""
    victims: int = 0
    """Of processes that resume: failures that were caused by a lost peer."""
    times: Counter[int] = field(default_factory=Counter)
    has_begun: bool = False
    """Whether the leader was restarted: its heartbeat starts from zero, the training does not."""

    @property
    def resumed(self) -> int:
        """The number of faults: a process that fails because of another is not a second fault."""
        return max(self.faults, self.victims)

    def begin(self) -> None:
        """Start another attempt."""
        self.has_begun = False
        self.times.clear()

    def counts(self, rank: int, role: Role, failure: dict[str, Any], max_restarts: int) -> bool:
        """Whether a process is restarted after this `failure`; counts it then."""
        is_victim = bool(failure.get("peer_lost"))
        if role.resumes:
            most = max_restarts - (self.victims if is_victim else self.faults)
        else:
            most = role.rejoins - self.times[rank]
        if most <= 0 or not failure.get("passing", True):
            return False
        self.times[rank] += 1
        if role.resumes:
            self.has_begun = True
            self.victims += is_victim
            self.faults += not is_victim
        return True


NO_SMALLER = """--micro-batch auto has no smaller size to try: it ends at one sample, and with
--bitwise, BatchNorm or MixtureOfExperts at one whole shard
do: more and smaller shards (--set shards=N, another job), --strategy fsdp, or
--activation-checkpointing"""


SAME_FAULT_TWICE = "not started again: the same fault came twice, with no step between"


@dataclass
class Attempts:
    """One job in its run folder; `started_at` (monotonic) is where its time limit counts from."""

    resources: Resources
    plan: LaunchPlan
    folder: RunFolder
    signals: Signals
    on_tick: Callable[[], None]
    started_at: float

    def __post_init__(self) -> None:
        self._programs = SamePrograms(self.folder.path, self.folder.events)
        self._rejoining = Rejoining()
        self._scaling: Scaling | None = None
        self._trials = 0
        self._secret = secrets.token_hex(32)

    @property
    def first(self) -> int:
        """The number of the first attempt of this start; the run folder counts on."""
        return self.folder.attempts

    def run(self, target: str) -> dict[str, Any]:
        """Run attempts until one succeeds; returns the leader's summary, or raises the job's error.

        The error's message says how to resume from the last checkpoint, if there is one.
        """
        self._target = target
        try:
            return self._run()
        except (ProgramError, PlaceError) as error:
            if not (again := how_to_resume(self.folder.path)):
                raise
            if isinstance(error, PlaceError):
                raise PlaceError(f"{error}\n{again}") from None
            raise error.with_more(again) from None

    def _run(self) -> dict[str, Any]:
        before: RankFault | None = None
        report = ""
        for attempt in itertools.count(self.first):
            self._attempt = attempt
            self._plan_again()
            if report:
                self._reserve_room_again(report)
            self._programs.begin()
            with closing(self._heartbeats()) as self._table:
                kills = Kills.now()
                ended = self._try()
                self._look_at_programs(at_once=True)
                beats = self._table.read_members()
            memory, path = Kills.now().since(kills), self.folder.path
            fault = first_fault(ended, path, self._attempt, memory, beats, must_say_so=True)
            exits = {rank: exit_.code for rank, exit_ in sorted(ended.exits.items())}
            summary = self._summary()
            if summary is not None and (fault is None or ended.hang is not None):  # hung at the end
                self._record("done", exits=exits)
                restarts = self._attempt - self.first
                return {**summary, "restarts": restarts, **self._not_kept(summary)}
            if ended.reason:
                report_of_fault = ""
                if ended.hang is not None or (fault is not None and not fault.is_victim):
                    report_of_fault = f"\n{self._error(ended, fault, beats)[0]}"
                raise self._stopped(ended, exits, report_of_fault)
            error, first_rank = self._error(ended, fault, beats)
            last, repeats = self._is_last(error), fault is not None and fault.repeats(before)
            if repeats and not last:
                error = ProgramError(f"{error}\n{SAME_FAULT_TWICE}", fault_kind=error.fault_kind)
            smaller = self._smaller(fault)
            if smaller is None and self._tries_micro_batches(fault) and last:
                error = error.with_more(NO_SMALLER)
            values = {"first_rank": first_rank, **_error_fields(error), "exits": exits}
            if smaller is not None:
                self._change_micro_batch(smaller)
                fault, values = None, {**values, "micro_batch": smaller}
            elif last or repeats or (fault is not None and not fault.is_passing):
                self._record("failed", **values)
                raise error
            before, report = fault, str(error)
            self._record_restart(values, max(beat.step for beat in beats))
        raise AssertionError("the last attempt returns or raises")

    def _is_last(self, error: AllranksError) -> bool:
        """Whether no attempt follows one that ended by this error."""
        counted = self._attempt - self.first - self._trials + self._rejoining.resumed
        return counted >= self.plan.job.max_restarts or not error.passing

    def _record(self, event: str, **values: Any) -> None:
        self.folder.events.event(event, **values, attempt=self._attempt)

    def _record_failed(self, error: AllranksError) -> None:
        self._record("failed", **_error_fields(error))

    def _events(self, rank: int) -> list[dict[str, Any]]:
        """The events of a rank in this attempt."""
        return events_of(self.folder.path, rank, self._attempt)

    def _heartbeats(self) -> HeartbeatTable:
        """The memory of the ranks, with rows for those that may join."""
        begin, job = len(self.plan.ranks), self.plan.job
        return HeartbeatTable(elastic_range(job)[1] if job.elastic else begin, begin)

    def _smaller(self, fault: RankFault | None) -> int | None:
        """The micro-batch to try after this fault: the smallest that a rank without memory names.

        `None` where it is no such fault, or the micro-batch was not left to a trial.
        """
        if not self._tries_micro_batches(fault):
            return None
        rows = (row for rank in self.plan.ranks for row in self._events(rank.world.rank))
        no_memory = (row for row in rows if row.get("fault_kind") == FaultKind.OUT_OF_MEMORY)
        named = [row["smaller"] for row in no_memory if "smaller" in row]
        smallest = None if None in named else min(named, default=None)
        now = self.plan.job.micro_batch  # which every trial makes smaller, so that they end
        return None if smallest is None or (now and smallest >= now) else smallest

    def _tries_micro_batches(self, fault: RankFault | None) -> bool:
        """Whether a rank had no memory, and the size of a micro-batch was left to a trial."""
        job = self.plan.job  # a check records every step once, so it tries nothing
        is_trial = job.micro_batch_trial and not job.trace
        return is_trial and fault is not None and fault.kind == FaultKind.OUT_OF_MEMORY

    def _change_micro_batch(self, samples: int) -> None:
        """Go on with micro-batches of so many samples, on all ranks, also when it is resumed."""
        self._trials += 1
        job = dataclasses.replace(self.plan.job, micro_batch=samples)
        self.plan = dataclasses.replace(self.plan, job=job)
        self.folder.change_job(micro_batch=samples)

    def _not_kept(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The files that were not kept: those in the summary, and those of the supervisor."""
        lost = {**summary.get("not_kept", {}), **self.folder.removed}
        return {"not_kept": lost} if lost else {}

    def _plan_again(self) -> None:
        """Plan for the nodes that are alive now; some may have been lost since the last attempt."""
        before = self.plan
        try:
            self.plan = self.resources.replan(self.plan)
        except PlaceError as error:
            self._record_failed(error)
            raise
        was, now = before.job.ranks, self.plan.job
        if now.ranks != was:
            self.folder.events.event("fewer_ranks", was=was, ranks=now.ranks, nodes=now.nodes)
        if moved := self.plan.moved_since(before):
            self.folder.events.event("moved", processes=moved)

    def _reserve_room_again(self, report: str) -> None:
        """Reserve disk space for the logs, if there still is some; `report` is the last fault."""
        try:
            self.folder.take_room(rank.world.rank for rank in self.plan.ranks)
        except RequestError as full:
            error = PlaceError(f"{report}\nnot started again: {full.found}")
            self._record_failed(error)
            raise error from None

    def _try(self) -> Ended:
        """Start all ranks, and watch them until all have ended."""
        process_set = self.plan.process_set
        self._rejoining.begin()
        policy = WatchPolicy(
            heartbeats=self._table,
            hang_timeout_s=self.plan.job.hang_timeout,
            stop_at=self._stop_at(),
            evidence_s=self.resources.evidence_s,
            ended_well=lambda rank: ended_well(self._events(rank)),
            may_lose=self._may_lose,
            outlive_nodes=process_set.outlive_nodes,
            again=self._again,
            on_lost=self._on_lost,
            helpers=process_set.helpers,
        )
        if self.plan.job.elastic:
            self._scaling = self._elastic()
            every = frozenset(range(self._table.ranks))
            policy = dataclasses.replace(policy, steer=self._scaling.steer, outlive_nodes=every)
        hosts = [*self._hosts, *[""] * (self._table.ranks - len(self._hosts))]
        stragglers = Stragglers(self._table, self.folder.events, hosts)

        def tick() -> None:
            self.folder.look_if_due()
            if not process_set.outlive_nodes:  # else no rank waits for the slowest
                stragglers.look()
            self.resources.inject_due_faults(self._table.read_members())
            self._look_at_programs()
            with suppress(OSError, ValueError):  # a display must not end the training
                self.on_tick()

        self._record("attempt")
        processes = [self._process(rank) for rank in self.plan.ranks]
        try:
            ended = supervise(self.resources.server, processes, tick, policy, self.signals)
            self.folder.look()
            return ended
        except PlaceError as error:
            if self._summary() is None:
                self._record_failed(error)
                raise
            return Ended({}, frozenset())  # the fork server died after the job was done
        finally:
            store = f"{STORE}-{self._attempt}"
            for path in (self.folder.path / store, *self.folder.path.glob(f"{store}-*")):
                path.unlink(missing_ok=True)

    @property
    def _hosts(self) -> list[str]:
        return [rank.host for rank in self.plan.ranks]

    def _elastic(self) -> Scaling:
        """What lets ranks of an elastic job leave and join in this attempt."""
        job, programs = self.plan.job, self._programs
        return Scaling(
            Bounds(*elastic_range(job)),
            self.folder,
            self._attempt,
            self._table,
            partial(self.resources.plan_for, self.plan),
            self._process,
            partial(programs.edited, job.program),
            programs.differs,
            bool(self.plan.ranks[0].world.rendezvous),
            self.resources.drained,
            self.resources.back,
        )

    def _may_lose(self, rank: int, remaining: Collection[int]) -> bool:
        """Whether the job goes on with the `remaining` processes, without this one."""
        failure = last_failure(self._events(rank))
        may_pass = bool(failure.get("passing", True))
        if self._scaling is None:
            beats = self._table.read()  # those of other nodes may come late
            has_begun = beats[LEADER].step >= 0 or any(beat.has_ended_a_step for beat in beats)
            has_begun = has_begun or self._rejoining.has_begun
            survives = self.plan.process_set.survives_loss_of
            return has_begun and may_pass and survives(rank, remaining)
        if rank in self._table.group.members and rank not in self._scaling.joining:
            leaves = may_pass or failure["kind"] == ComputesWrongly.__name__
            if not leaves or failure.get("kind") == ReplicasDiffer.__name__:  # all raise it
                return False
        return self._scaling.may_lose(rank, remaining)

    def _again(self, rank: int, exit_: Exit) -> Process | None:
        """The process that replaces a failed one while the others go on, or `None`."""
        members, most = self.plan.process_set.members, self.plan.job.max_restarts
        if rank >= len(members):  # it has joined an elastic job
            return None
        failure = last_failure(self._events(rank))
        if not self._rejoining.counts(rank, members[rank].role, failure, most):
            return None
        return self._process(self.plan.ranks[rank], again=self._rejoining.times[rank])

    def _look_at_programs(self, at_once: bool = False) -> None:
        try:
            self._programs.look(self._attempt, self._hosts, at_once)
        except PlaceError as error:
            if at_once:  # else `_try` records it
                self._record_failed(error)
            raise

    def _stop_at(self) -> float:
        """When to ask for a stop: at the time limit, or before the allocation ends."""
        limit = self.plan.job.time_limit
        at_limit = NEVER if limit is None else self.started_at + limit
        left_s = self.resources.ends_at - time.monotonic()
        return min(at_limit, self.resources.ends_at - min(COMMIT_S, left_s / 10))

    def _process(self, rank: RankPlan, again: int = 0) -> Process:
        """The process of a rank; `again` counts its restarts in this attempt."""
        store = f"{rank.world.store}-{self._attempt}" if rank.world.store else ""
        may_lead = rank.world.is_leader or bool(self.plan.job.elastic)
        hosts_store = bool(rank.world.rendezvous) and may_lead and not again
        world = dataclasses.replace(
            rank.world,
            store=store,
            attempt=self._attempt,
            restarts=self._attempt - self.first + again,
            secret=self._secret,
            heartbeat=HEARTBEAT_FD,
            segment=SEGMENT_FD,
            listener=LISTENER_FD if hosts_store else -1,
        )
        return Process(
            world.rank,
            self._target,
            self.plan.job.to_data(),
            {**rank.environment, **world.variables()},
            rank_log_path(self.folder.path, world.rank),
            hosts_store,
            self.plan.process_set.name_of(world.rank),
            rank.defaults,
        )

    def _summary(self) -> dict[str, Any] | None:
        """The leader's summary, if it wrote `done` in this attempt."""
        rows = self._events_of_leader()
        return next((dict(row["summary"]) for row in rows if row["event"] == "done"), None)

    def _events_of_leader(self) -> list[dict[str, Any]]:
        """The events of rank 0; in an elastic job those of the first rank that has ended well."""
        members = self._table.group.members if self.plan.job.elastic else (LEADER,)
        every = [self._events(rank) for rank in members]
        return next((rows for rows in every if ended_well(rows)), every[0])

    def _stopped(
        self, ended: Ended, exits: dict[int, int], fault_report: str
    ) -> Stopped | Interrupted | ProgramError:
        """The error of a job that was asked to stop, with a checkpoint or without.

        `fault_report` is the report of a fault before the stop was complete, on separate lines.
        """
        path = self.folder.path
        stop = next((row for row in self._events_of_leader() if row["event"] == "stopped"), {})
        if not stop.get("checkpoint"):
            report = fault_report.strip() or None
            self.folder.events.event("interrupted", exits=exits, reason=ended.reason, report=report)
            lost = how_to_resume(path) or "there is no checkpoint"
            return Interrupted(
                f"interrupted ({ended.reason}); every rank is stopped; {lost}\n{path}{fault_report}"
            )
        again = resume_command(path)
        text = f"stopped ({ended.reason}) after step {stop['step']}, which is committed; {again}"
        self.folder.events.event("stopped", exits=exits, reason=ended.reason, step=stop["step"])
        return stopped_by(ended.reason, text)

    def _error(
        self, ended: Ended, fault: RankFault | None, beats: Sequence[Beat]
    ) -> tuple[ProgramError | Any, int | None]:
        """The error of an attempt that failed, and the rank to name."""
        path = self.folder.path
        if ended.hang is not None:
            report = hang_report(ended.hang, path, self._attempt, self._hosts, ended.name_of)
            hung = ProgramError(report, fault_kind=FaultKind.HANG)
            return hung, next(iter(ended.hang.missing), None)
        lost = self.resources.lost() if fault is None or fault.is_victim else ""
        if lost:  # peers noticed the lost node before the head
            return PlaceError(lost), None
        if fault is None:
            text = f"all ranks ended well, but {path} holds no summary of the leader"
            return PlaceError(text), None
        error = user_error(fault, ended, path)
        if isinstance(error, ProgramError) and fault.kind == FaultKind.NOT_AT_THE_SAME_STEP:
            error = error.with_more(skipped_collective(beats))
        if isinstance(error, ProgramError):
            error = error.with_more(self._too_few_without(fault.rank))
        begun = self.plan.job.elastic and max(beat.step for beat in beats) > 0
        begun = begun or self._table.group.number > 0 or self._attempt > self.first
        if isinstance(error, RequestError) and begun:
            error = ProgramError(str(error))  # the run folder stays
        return error, rank_to_blame(fault, ended, path)

    def _too_few_without(self, rank: int) -> str:
        """Why the ranks of an elastic job did not go on without this one, if too few were left."""
        members, elastic = self._table.group.members, self.plan.job.elastic
        others = len(set(members) - {rank})
        if not elastic or rank not in members or others >= elastic_range(self.plan.job)[0]:
            return ""
        return f"the others did not go on: {others} would be left, under --elastic {elastic}"

    def _on_lost(self, rank: int, exit_: Exit) -> None:
        """Record a process without which the job goes on, and the last lines of its output."""
        if self._scaling is not None:
            self._scaling.lost(rank, exit_)
        event = last_failure(self._events(rank)) if exit_.code >= 0 else {}
        fault = RankFault(rank, exit_, exit_.monotonic, event or None, exit_.memory or "")
        host = exit_.host if self.plan.job.nodes > 1 else ""
        self.folder.events.event(
            "worker_lost",
            rank=rank,
            who=f"{self.plan.process_set.name_of(rank)}{f' on {host}' if host else ''}",
            host=host,
            exit=exit_.code,
            cause=exit_.lost or describe_cause(fault),
            last_words=last_words(rank_log_path(self.folder.path, rank)).text,
        )

    def _record_restart(self, values: dict[str, Any], reached: int) -> None:
        """Record a restart: its cause, the step of its checkpoint, and the steps that are lost."""
        sources, resume = [self.folder.path / CHECKPOINTS], self.plan.job.resume
        if resume:
            sources += checkpoint_folders(Path(resume))
        saved = [path for source in sources for path in candidates(source)]
        step = max(0, step_of(saved[0])) if saved else 0
        lost_steps = max(0, reached - step)
        self._record("restart", **values, resumes_from=step, lost_steps=lost_steps)


def _error_fields(error: AllranksError) -> dict[str, Any]:
    """The fields of an error in events: its kind for programs, its message for people."""
    return {"fault_kind": error.fault_kind, "report": str(error)}
