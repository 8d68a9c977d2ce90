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
from allranks.job.program import MODULES, PROGRAM, by_name, file_sha256
from allranks.job.resume import CHECKPOINTS, checkpoint_folders, how_to_resume, resume_command
from allranks.job.run_folder import JsonLines, RunFolder, rank_events_path, rank_log_path, read_rows
from allranks.job.scaling import Bounds
from allranks.launcher.fault_report import (
    RankFault,
    describe_cause,
    ended_well,
    events_of,
    first_fault,
    hang_report,
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
from allranks.launcher.scaling import Scaling
from allranks.launcher.supervisor import (
    COMMIT_S,
    NEVER,
    Ended,
    Signals,
    WatchPolicy,
    supervise,
)
from allranks.strategies.roles import LEADER

# --- rejoining -----------------------------------------------------------------------------------
# Processes that are restarted while the others go on: learners that rejoin, or a leader that loads
# its checkpoint while the others wait.
#
# The strategy's card says which roles rejoin. A process whose error would repeat does not.


@dataclass
class Rejoining:
    """How often each process of an attempt was restarted."""

    faults: int = 0
    """Of processes that resume: failures that were not caused by a peer."""
    victims: int = 0
    """Of processes that resume: failures that were caused by a lost peer."""
    times: Counter[int] = field(default_factory=Counter)
    has_begun: bool = False
    """Whether the leader was restarted: its heartbeat starts from zero, the training does not."""
    plan: LaunchPlan | None = None
    make: Callable[..., Process] | None = None

    @property
    def resumed(self) -> int:
        """The number of faults: a process that fails because of another is not a second fault."""
        return max(self.faults, self.victims)

    def begin(self, plan: LaunchPlan, make: Callable[..., Process]) -> None:
        """Start an attempt: `make(rank_plan, again=n)` is the process of the `n`-th restart."""
        self.plan, self.make, self.has_begun = plan, make, False
        self.times.clear()

    def again(self, run_dir: Path, attempt: int, rank: int, exit_: Exit) -> Process | None:
        """The process that replaces a failed one, or `None`."""
        assert self.plan is not None and self.make is not None
        members = self.plan.process_set.members
        if rank >= len(members):  # it has joined an elastic job
            return None
        role = members[rank].role
        failure = self.failure(run_dir, rank, attempt)
        is_victim = bool(failure.get("peer_lost"))
        if role.resumes:
            most = self.plan.job.max_restarts - (self.victims if is_victim else self.faults)
        else:
            most = role.rejoins - self.times[rank]
        if most <= 0 or not failure.get("passing", True):
            return None
        self.times[rank] += 1
        if role.resumes:
            self.has_begun = True
            self.victims += is_victim
            self.faults += not is_victim
        planned: RankPlan = self.plan.ranks[rank]
        return self.make(planned, again=self.times[rank])

    def may_pass(self, run_dir: Path, rank: int, attempt: int) -> bool:
        """Whether a restart may help, by the process's own `failed` event."""
        return bool(self.failure(run_dir, rank, attempt).get("passing", True))

    def failure(self, run_dir: Path, rank: int, attempt: int) -> dict[str, Any]:
        """Its last `failed` event; empty if it wrote none."""
        rows = [row for row in events_of(run_dir, rank, attempt) if row["event"] == "failed"]
        return rows[-1] if rows else {}


# --- same program --------------------------------------------------------------------------------
# Whether all ranks have loaded the same program, and the same as in the attempt before.
#
# Every rank writes into its first event the user's files that it loaded, with their digests. Ranks
# with different files would train different programs without any error: the job ends, and names
# the file. A program that was edited between two attempts is recorded as `program_changed`.


COMPARE_EVERY_S = 0.5
PATIENCE_S = 60.0
SHOWN = 12  # letters of a digest


@dataclass
class SamePrograms:
    """Compares the program files of all ranks, attempt by attempt."""

    run_dir: Path
    events: JsonLines
    _of_rank: dict[int, dict[str, object]] = field(default_factory=dict)
    _before: dict[str, object] = field(default_factory=dict)
    _looked_at: float = 0.0
    _first_at: float = 0.0

    def begin(self) -> None:
        """Start another attempt."""
        self._before = next(iter(self._of_rank.values()), self._before)
        self._of_rank, self._looked_at = {}, 0.0

    def look(self, attempt: int, hosts: Sequence[str], at_once: bool = False) -> None:
        """Read the new `ready` events of ranks; raises `PlaceError` where files differ."""
        now = time.monotonic()
        all_have = len(self._of_rank) == len(hosts)
        too_late = self._of_rank and now - self._first_at > PATIENCE_S  # some ranks never write it
        if not at_once and (all_have or too_late or now - self._looked_at < COMPARE_EVERY_S):
            return
        self._looked_at = now
        for rank in range(len(hosts)):
            if rank in self._of_rank:
                continue
            for row in read_rows(rank_events_path(self.run_dir, rank)):
                is_now = row["event"] == "ready" and row.get("attempt", 0) == attempt
                if is_now and "machine" in row:  # parameter servers do not write it
                    self._compare(rank, _files(row["machine"]), hosts)

    def edited(self, program: str) -> str:
        """The file of the program, if it is no longer as the ranks have loaded it; else ""."""
        for files in self._of_rank.values():
            return "" if files.get(PROGRAM) == file_sha256(program) else program
        return ""

    def differs(self, ready: dict[str, Any]) -> str:
        """A file that a new rank has loaded otherwise than the others; "" if there is none."""
        first = next(iter(self._of_rank.values()), {})
        return next(iter(_unequal(first, _files(ready["machine"]))), "")

    def _compare(self, rank: int, files: dict[str, object], hosts: Sequence[str]) -> None:
        first = next(iter(self._of_rank), rank)
        if first == rank:
            self._of_rank[rank], self._first_at = files, self._looked_at
            self._record_changes(files)
        unequal = _unequal(self._of_rank[first], files)
        if unequal:
            lines = []
            for name, values in unequal.items():
                pairs = sorted(zip((first, rank), values, strict=True), key=lambda pair: pair[0])
                versions = [f"rank {r}{_on(hosts[r])} has {_shown(digest)}" for r, digest in pairs]
                lines.append(f"  {name}: {', '.join(versions)}")
            raise PlaceError(
                "the ranks have not loaded the same program, and would not compute the same:\n"
                + "\n".join(lines)
                + "\nput the same files on every node, and edit none while a job starts"
            )
        self._of_rank[rank] = files  # only if equal, so that the check at the end raises too

    def _record_changes(self, files: dict[str, object]) -> None:
        changed = _unequal(self._before, files) if self._before else {}
        if changed:
            self.events.event("program_changed", differs={n: list(v) for n, v in changed.items()})


def _files(machine: dict[str, object]) -> dict[str, object]:
    return by_name({name: machine.get(name) for name in (PROGRAM, MODULES)})


def _unequal(was: dict[str, object], now: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Name -> (was, now) of files in both that differ; a rank may import some files later."""
    both = [name for name in was if name in now]
    return {name: (was[name], now[name]) for name in both if was[name] != now[name]}


def _on(host: str) -> str:
    return f" on {host}" if host else ""


def _shown(digest: object) -> str:
    return str(digest)[:SHOWN] if digest else "none"


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
        try:
            return self._run(target)
        except (ProgramError, PlaceError) as error:
            if not (again := how_to_resume(self.folder.path)):
                raise
            if isinstance(error, PlaceError):
                raise PlaceError(f"{error}\n{again}") from None
            raise error.with_more(again) from None

    def _run(self, target: str) -> dict[str, Any]:
        restarts, first = self.plan.job.max_restarts, self.first
        before: RankFault | None = None
        report = ""
        for attempt in itertools.count(first):
            self._plan_again(attempt)
            if report:
                self._reserve_room_again(attempt, report)
            self._programs.begin()
            with closing(self._heartbeats()) as heartbeats:
                kills = Kills.now()
                ended = self._try(target, attempt, heartbeats)
                self._look_at_programs(attempt, at_once=True)
                beats = heartbeats.read_members()
            memory = Kills.now().since(kills)
            fault = first_fault(ended, self.folder.path, attempt, memory, beats, must_say_so=True)
            exits = {rank: exit_.code for rank, exit_ in sorted(ended.exits.items())}
            summary = self._summary(attempt)
            if summary is not None and (fault is None or ended.hang is not None):  # hung at the end
                self.folder.events.event("done", exits=exits, attempt=attempt)
                return {**summary, "restarts": attempt - first, **self._not_kept(summary)}
            if ended.reason:
                report_of_fault = ""
                if ended.hang is not None or (fault is not None and not fault.is_victim):
                    report_of_fault = f"\n{self._error(ended, fault, attempt, beats)[0]}"
                raise self._stopped(ended, attempt, exits, report_of_fault)
            error, first_rank = self._error(ended, fault, attempt, beats)
            counted = attempt - first - self._trials + self._rejoining.resumed
            last = counted >= restarts or not error.passing
            again = fault is not None and fault.repeats(before)
            if again and not last:
                error = ProgramError(f"{error}\n{SAME_FAULT_TWICE}", fault_kind=error.fault_kind)
            reached = max(beat.step for beat in beats)
            smaller = self._smaller(fault, attempt)
            if smaller is None and self._tries_micro_batches(fault) and last:
                error = error.with_more(NO_SMALLER)
            values = {"first_rank": first_rank, **_error_fields(error), "exits": exits}
            if smaller is not None:
                self._change_micro_batch(smaller)
                before, report = None, str(error)
                self._record_restart({**values, "micro_batch": smaller}, attempt, reached)
                continue
            if last or again or (fault is not None and not fault.is_passing):
                self.folder.events.event("failed", **values, attempt=attempt)
                raise error
            before, report = fault, str(error)
            self._record_restart(values, attempt, reached)
        raise AssertionError("the last attempt returns or raises")

    def _heartbeats(self) -> HeartbeatTable:
        """The memory of the ranks, with rows for those that may join."""
        begin, job = len(self.plan.ranks), self.plan.job
        return HeartbeatTable(elastic_range(job)[1] if job.elastic else begin, begin)

    def _smaller(self, fault: RankFault | None, attempt: int) -> int | None:
        """The micro-batch to try after this fault: the smallest that a rank without memory names.

        `None` where it is no such fault, or the micro-batch was not left to a trial.
        """
        if not self._tries_micro_batches(fault):
            return None
        every = (row for rank in self.plan.ranks for row in self._failures(rank, attempt))
        named = [row["smaller"] for row in every if row["fault_kind"] == FaultKind.OUT_OF_MEMORY]
        smallest = None if None in named else min(named, default=None)
        now = self.plan.job.micro_batch  # which every trial makes smaller, so that they end
        return None if smallest is None or (now and smallest >= now) else smallest

    def _tries_micro_batches(self, fault: RankFault | None) -> bool:
        """Whether a rank had no memory, and the size of a micro-batch was left to a trial."""
        job = self.plan.job  # a check records every step once, so it tries nothing
        is_trial = job.micro_batch_trial and not job.trace
        return is_trial and fault is not None and fault.kind == FaultKind.OUT_OF_MEMORY

    def _failures(self, rank: RankPlan, attempt: int) -> list[dict[str, Any]]:
        """The `failed` events of a rank whose step failed, and that named a micro-batch."""
        rows = events_of(self.folder.path, rank.world.rank, attempt)
        return [row for row in rows if row["event"] == "failed" and "smaller" in row]

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

    def _plan_again(self, attempt: int) -> None:
        """Plan for the nodes that are alive now; some may have been lost since the last attempt."""
        before = self.plan
        try:
            self.plan = self.resources.replan(self.plan)
        except PlaceError as error:
            self.folder.events.event("failed", **_error_fields(error), attempt=attempt)
            raise
        was, now = before.job.ranks, self.plan.job
        if now.ranks != was:
            self.folder.events.event("fewer_ranks", was=was, ranks=now.ranks, nodes=now.nodes)
        if moved := self.plan.moved_since(before):
            self.folder.events.event("moved", processes=moved)

    def _reserve_room_again(self, attempt: int, report: str) -> None:
        """Reserve disk space for the logs, if there still is some; `report` is the last fault."""
        try:
            self.folder.take_room(rank.world.rank for rank in self.plan.ranks)
        except RequestError as full:
            error = PlaceError(f"{report}\nnot started again: {full.found}")
            self.folder.events.event("failed", **_error_fields(error), attempt=attempt)
            raise error from None

    def _try(self, target: str, attempt: int, heartbeats: HeartbeatTable) -> Ended:
        """Start all ranks, and watch them until all have ended."""
        job, process_set, rejoining = self.plan.job, self.plan.process_set, self._rejoining
        make = partial(self._process, target=target, attempt=attempt)
        rejoining.begin(self.plan, make)
        self._table = heartbeats
        policy = WatchPolicy(
            heartbeats=heartbeats,
            hang_timeout_s=job.hang_timeout,
            stop_at=self._stop_at(),
            evidence_s=self.resources.evidence_s,
            ended_well=lambda rank: ended_well(events_of(self.folder.path, rank, attempt)),
            may_lose=lambda rank, remaining: (
                (rejoining.has_begun or heartbeats.read()[LEADER].step >= 0)
                and rejoining.may_pass(self.folder.path, rank, attempt)
                and process_set.survives_loss_of(rank, remaining)
            ),
            outlive_nodes=process_set.outlive_nodes,
            again=partial(rejoining.again, self.folder.path, attempt),
            on_lost=partial(self._record_lost, attempt),
            helpers=process_set.helpers,
        )
        if job.elastic:
            policy = self._elastic(policy, attempt, make)
        hosts = [rank.host for rank in self.plan.ranks]
        hosts += [""] * (heartbeats.ranks - len(hosts))
        stragglers = Stragglers(heartbeats, self.folder.events, hosts)

        def tick() -> None:
            self.folder.look_if_due()
            if not process_set.outlive_nodes:  # else no rank waits for the slowest
                stragglers.look()
            self.resources.inject_due_faults(heartbeats.read_members())
            self._look_at_programs(attempt)
            with suppress(OSError, ValueError):  # a display must not end the training
                self.on_tick()

        self.folder.events.event("attempt", attempt=attempt)
        processes = [self._process(rank, target, attempt) for rank in self.plan.ranks]
        try:
            ended = supervise(self.resources.server, processes, tick, policy, self.signals)
            self.folder.look()
            return ended
        except PlaceError as error:
            if self._summary(attempt) is None:
                self.folder.events.event("failed", **_error_fields(error), attempt=attempt)
                raise
            return Ended({}, frozenset())  # the fork server died after the job was done
        finally:
            store = f"{STORE}-{attempt}"
            for path in (self.folder.path / store, *self.folder.path.glob(f"{store}-group-*")):
                path.unlink(missing_ok=True)

    def _elastic(
        self, policy: WatchPolicy, attempt: int, make: Callable[[RankPlan], Process]
    ) -> WatchPolicy:
        """The policy of a job whose ranks leave and join."""
        job, programs, heartbeats = self.plan.job, self._programs, self._table

        def may_lose(rank: int, remaining: Collection[int]) -> bool:
            if rank in heartbeats.group.members and rank not in scaling.joining:
                failure = self._rejoining.failure(self.folder.path, rank, attempt)
                leaves = failure.get("passing", True) or failure["kind"] == ComputesWrongly.__name__
                if not leaves or failure.get("kind") == ReplicasDiffer.__name__:  # all raise it
                    return False
            return scaling.may_lose(rank, remaining)

        def on_lost(rank: int, exit_: Exit) -> None:
            scaling.lost(rank, exit_)
            self._record_lost(attempt, rank, exit_)

        on = (Bounds(*elastic_range(job)), self.folder, attempt, heartbeats)
        plan_for = partial(self.resources.plan_for, self.plan)
        of_program = partial(programs.edited, job.program), programs.differs
        scaling = Scaling(*on, plan_for, make, *of_program, job.nodes > 1, self.resources.drained)
        ranks = frozenset(range(heartbeats.ranks))
        policy = dataclasses.replace(policy, may_lose=may_lose, steer=scaling.steer)
        return dataclasses.replace(policy, on_lost=on_lost, outlive_nodes=ranks)

    def _look_at_programs(self, attempt: int, at_once: bool = False) -> None:
        try:
            self._programs.look(attempt, [rank.host for rank in self.plan.ranks], at_once)
        except PlaceError as error:
            if at_once:  # else `_try` records it
                self.folder.events.event("failed", **_error_fields(error), attempt=attempt)
            raise

    def _stop_at(self) -> float:
        """When to ask for a stop: at the time limit, or before the allocation ends."""
        limit = self.plan.job.time_limit
        at_limit = NEVER if limit is None else self.started_at + limit
        left_s = self.resources.ends_at - time.monotonic()
        return min(at_limit, self.resources.ends_at - min(COMMIT_S, left_s / 10))

    def _process(self, rank: RankPlan, target: str, attempt: int, again: int = 0) -> Process:
        """The process of a rank; `again` counts its restarts in this attempt."""
        store = f"{rank.world.store}-{attempt}" if rank.world.store else ""
        may_lead = rank.world.is_leader or bool(self.plan.job.elastic)
        hosts_store = bool(rank.world.rendezvous) and may_lead and not again
        world = dataclasses.replace(
            rank.world,
            store=store,
            attempt=attempt,
            restarts=attempt - self.first + again,
            secret=self._secret,
            heartbeat=HEARTBEAT_FD,
            segment=SEGMENT_FD,
            listener=LISTENER_FD if hosts_store else -1,
        )
        log = rank_log_path(self.folder.path, world.rank)
        environment = {**rank.environment, **world.variables()}
        argument = self.plan.job.to_data()
        name = self.plan.process_set.name_of(world.rank)
        return Process(
            world.rank, target, argument, environment, log, hosts_store, name, rank.defaults
        )

    def _summary(self, attempt: int) -> dict[str, Any] | None:
        """The leader's summary, if it wrote `done` in this attempt."""
        for row in self._events_of_leader(attempt):
            if row["event"] == "done":
                return dict(row["summary"])
        return None

    def _events_of_leader(self, attempt: int) -> list[dict[str, Any]]:
        """The events of rank 0; in an elastic job those of the first rank that has ended well."""
        members = self._table.group.members if self.plan.job.elastic else (LEADER,)
        every = [events_of(self.folder.path, rank, attempt) for rank in members]
        return next((rows for rows in every if ended_well(rows)), every[0])

    def _stopped(
        self, ended: Ended, attempt: int, exits: dict[int, int], fault_report: str
    ) -> Stopped | Interrupted | ProgramError:
        """The error of a job that was asked to stop, with a checkpoint or without.

        `fault_report` is the report of a fault before the stop was complete, on separate lines.
        """
        path = self.folder.path
        rows = self._events_of_leader(attempt)
        stop = next((row for row in rows if row["event"] == "stopped"), {})
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
        self, ended: Ended, fault: RankFault | None, attempt: int, beats: Sequence[Beat]
    ) -> tuple[ProgramError | Any, int | None]:
        """The error of an attempt that failed, and the rank to name."""
        if ended.hang is not None:
            hosts = [rank.host for rank in self.plan.ranks]
            report = hang_report(ended.hang, self.folder.path, attempt, hosts, ended.name_of)
            hung = ProgramError(report, fault_kind=FaultKind.HANG)
            return hung, next(iter(ended.hang.missing), None)
        lost = self.resources.lost() if fault is None or fault.is_victim else ""
        if lost:  # peers noticed the lost node before the head
            return PlaceError(lost), None
        if fault is not None:
            error = user_error(fault, ended, self.folder.path)
            if isinstance(error, ProgramError) and fault.kind == FaultKind.NOT_AT_THE_SAME_STEP:
                error = error.with_more(skipped_collective(beats))
            begun = self.plan.job.elastic and max(beat.step for beat in beats) > 0
            begun = begun or self._table.group.number > 0 or attempt > self.first
            if isinstance(error, RequestError) and begun:
                error = ProgramError(str(error))  # the run folder stays
            return error, rank_to_blame(fault, ended, self.folder.path)
        return PlaceError(
            f"all ranks ended well, but {self.folder.path} holds no summary of the leader"
        ), None

    def _record_lost(self, attempt: int, rank: int, exit_: Exit) -> None:
        """Record a process without which the job goes on, and the last lines of its output."""
        log, memory = rank_log_path(self.folder.path, rank), exit_.memory or ""
        events = [] if exit_.code < 0 else events_of(self.folder.path, rank, attempt)
        event = next((row for row in reversed(events) if row["event"] == "failed"), None)
        fault = RankFault(rank, exit_.code, exit_.monotonic, event, memory, exit_.peak_bytes)
        host = exit_.host if self.plan.job.nodes > 1 else ""
        self.folder.events.event(
            "worker_lost",
            rank=rank,
            who=f"{self.plan.process_set.name_of(rank)}{f' on {host}' if host else ''}",
            host=host,
            exit=exit_.code,
            cause=exit_.lost or describe_cause(fault),
            last_words=last_words(log).text,
        )

    def _record_restart(self, values: dict[str, Any], attempt: int, reached: int) -> None:
        """Record a restart: its cause, the step of its checkpoint, and the steps that are lost."""
        sources, resume = [self.folder.path / CHECKPOINTS], self.plan.job.resume
        if resume:
            sources += checkpoint_folders(Path(resume))
        saved = [path for source in sources for path in candidates(source)]
        step = max(0, step_of(saved[0])) if saved else 0
        self.folder.events.event(
            "restart",
            **values,
            attempt=attempt,
            resumes_from=step,
            lost_steps=max(0, reached - step),
        )


def _error_fields(error: AllranksError) -> dict[str, Any]:
    """The fields of an error in events: its kind for programs, its message for people."""
    return {"fault_kind": error.fault_kind, "report": str(error)}
