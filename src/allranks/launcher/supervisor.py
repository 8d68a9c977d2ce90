"""The supervisor starts, watches and stops every process of a job. It knows no framework.

The first failure or a hang stops all ranks, except roles the job can lose (`WatchPolicy.may_lose`).
Ctrl-C, SIGTERM and the time limit ask ranks with a heartbeat to commit a checkpoint and leave, and
stop the others. Processes that only serve the leader are ended when it is done. It returns when
every process has ended. `fault_report` decides which rank failed first. Below the watch itself: the
signals that it obeys, and which rank a hang waits for.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from allranks.errors import PlaceError
from allranks.launcher.heartbeat import Beat, HeartbeatTable
from allranks.launcher.processes.process import Exit, Process, Processes, ProcessState
from allranks.strategies.roles import LEADER

TICK_S = 0.1
EVIDENCE_S = 0.2
GRACE_S = 1.5
HELPERS_S = 1.0  # for helpers to write their last events and end, after their leader has
COMMIT_S = 120.0
SUSPENDED_S = 1.0
NEVER = float("inf")
MESSAGES = (signal.SIGUSR1, signal.SIGUSR2)  # they ask scripts for no stop


@dataclass(frozen=True)
class WatchPolicy:
    """How processes are watched. The default is that of processes without a heartbeat.

    `hang_timeout_s` 0 waits for ever; `stop_at` is on the monotonic clock. `ended_well(rank)` says
    whether a process with a bad exit code had completed its work. After the first fault the
    supervisor waits `evidence_s` before it stops the others: a victim may end before the cause.

    `may_lose(rank, remaining)` says whether the `remaining` ranks go on without one that failed;
    `on_lost` is called then. Ranks in `outlive_nodes` may also be lost with their node.
    `again(rank, exit)` is the process that replaces a failed one while the others go on, or `None`.
    `helpers` never end by themselves: they are ended when rank 0 has ended well. `steer` is called
    at each tick: in an elastic job it starts and dismisses ranks.
    """

    heartbeats: HeartbeatTable | None = None
    hang_timeout_s: float = 0.0
    stop_at: float = NEVER
    evidence_s: float = EVIDENCE_S
    ended_well: Callable[[int], bool] = lambda rank: False
    may_lose: Callable[[int, Collection[int]], bool] = lambda rank, remaining: False
    outlive_nodes: frozenset[int] = frozenset()
    again: Callable[[int, Exit], Process | None] = lambda rank, exit_: None
    on_lost: Callable[[int, Exit], None] = lambda rank, exit_: None
    helpers: frozenset[int] = frozenset()
    steer: Callable[[RankWatch], None] = lambda watch: None


@dataclass(frozen=True)
class Ended:
    """All processes have ended. `exits` by rank; `stopped` are the ranks that were told to stop.

    `reason` says why the job was asked to stop ("SIGTERM", "time limit"; "" if it was not).
    `spared` are failed ranks without which the job went on; `names` has the names of processes.
    `stands` has the stacks of the others when one ended by SIGABRT, as broken collectives do.
    """

    exits: dict[int, Exit]
    stopped: frozenset[int]
    reason: str = ""
    hang: Hang | None = None
    spared: frozenset[int] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)
    stands: Mapping[int, ProcessState] = field(default_factory=dict)

    def name_of(self, rank: int) -> str:
        """The name of a process in reports."""
        return self.names.get(rank) or f"rank {rank}"

    @property
    def interrupted(self) -> bool:
        return self.reason != ""


def supervise(
    server: Processes,
    processes: list[Process],
    on_tick: Callable[[], None] = lambda: None,
    policy: WatchPolicy | None = None,
    signals: Signals | None = None,
) -> Ended:
    """Run all `processes` to their end; one that fails, or an interrupt, stops the others.

    `signals` are the caller's handlers; without it they are installed meanwhile.
    """
    watch = RankWatch(server, policy or WatchPolicy())

    def tick() -> None:
        watch.policy.steer(watch)
        on_tick()

    with ExitStack() as stack:
        watch.run(processes, tick, signals or stack.enter_context(Signals()))
    names = {process.rank: process.name for process in processes if process.name}
    stopped = watch.stopped | watch.dismissed
    return Ended(watch.exits, stopped, watch.reason, watch.hang, watch.spared, names, watch.stands)


class Watch:
    """The loop that every job runs in, and the deadlines for stopping and killing its processes.

    A subclass says which exits stop the others, how processes are asked to stop, and when they
    hang. They are told to stop once, by `stop_signal`; those that do not end are killed.
    `time_limit_at` is on the monotonic clock.
    """

    stop_signal = signal.SIGTERM

    def __init__(self, server: Processes, time_limit_at: float) -> None:
        self.server, self.time_limit_at = server, time_limit_at
        self.alive: dict[int, int] = {}  # ticket -> rank
        self.exits: dict[int, Exit] = {}
        self.gone: frozenset[int] = frozenset()  # those of a lost node end at once
        self.stopped: frozenset[int] = frozenset()
        self.reason = self.asked_to_stop = ""  # the second: by whoever steers the job
        self.stop_at = self.kill_at = NEVER

    def run(self, processes: list[Process], on_tick: Callable[[], None], signals: Signals) -> None:
        """Run all `processes` to their end. None is left when this returns or raises."""
        try:
            for process in processes:
                self.start(process)
            while self.alive:
                self.take_exits()
                on_tick()
                self.handle_signals(signals)
                self.look_for_a_hang()
                self.stop_if_due()
        except BaseException:
            self._kill_all()
            raise

    def start(self, process: Process) -> None:
        self.alive[self.server.spawn(process)] = process.rank

    def take_exits(self) -> None:
        """Wait briefly for exits; after a fault the others are stopped soon."""
        exits = self.server.exits(TICK_S)
        if not exits:
            self.server.wake()
        self.gone = frozenset(self.alive.get(ended.ticket, -1) for ended in exits)
        for ended in exits:
            if ended.ticket not in self.alive:
                continue
            rank = self.alive.pop(ended.ticket)
            self.exits[rank] = ended
            wait_s = self.stops_others_after_s(rank, ended)
            self.stop_at = min(self.stop_at, time.monotonic() + wait_s)

    def stops_others_after_s(self, rank: int, ended: Exit) -> float:
        """How long after this exit the others are stopped; `NEVER` if they go on."""
        raise NotImplementedError

    def handle_signals(self, signals: Signals) -> None:
        """React to signals, here and on other nodes, and to the time limit. A second Ctrl-C kills.

        Only the first reason counts.
        """
        self.pass_on(signals)
        reason = signals.reason or self.server.stop_reason() or self.asked_to_stop
        if not reason and time.monotonic() >= self.time_limit_at:
            reason = "time limit"
        if reason and not self.reason:
            self.reason = reason
            self.ask_to_stop(signals)
        if signals.insists:
            self.kill_at = 0.0

    def pass_on(self, signals: Signals) -> None:
        """Tell processes of signals that ask for no stop."""
        raise NotImplementedError

    def ask_to_stop(self, signals: Signals) -> None:
        """Ask all processes to leave, and set the time until they are stopped or killed."""
        raise NotImplementedError

    def look_for_a_hang(self) -> None:
        """Stop all processes if they make no progress."""
        raise NotImplementedError

    def stop_if_due(self) -> None:
        now = time.monotonic()
        if now >= self.stop_at and not self.stopped:
            self._signal(self.stop_signal)
            self._kill_after(GRACE_S)
        if now >= self.kill_at:
            self.stopped = self.stopped or frozenset(self.alive.values())
            self._signal(signal.SIGKILL)
            self.kill_at = now + GRACE_S

    def _kill_after(self, seconds: float) -> None:
        """Note that all were told to stop; those that still live after `seconds` are killed."""
        self.stopped = frozenset(self.alive.values())
        self.stop_at, self.kill_at = NEVER, time.monotonic() + seconds

    def _signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those of `ranks` that are alive (`None`: to all).

        Halted processes are continued, unless it is only a message.
        """
        for ticket, rank in self.alive.items():
            if ranks is None or rank in ranks:
                self.server.signal(ticket, number)
                if number not in MESSAGES:
                    self.server.signal(ticket, signal.SIGCONT)

    def _kill_all(self) -> None:
        """Kill all, and wait for their ends. If the server has died, they have died with it."""
        with suppress(PlaceError):
            for ticket in self.alive:
                self.server.signal(ticket, signal.SIGKILL)
            while self.alive:
                for ended in self.server.exits(TICK_S):
                    self.alive.pop(ended.ticket, None)


class RankWatch(Watch):
    """Ranks of a task. A heartbeat asks them to stop, and shows whether they hang.

    Ranks with a heartbeat ignore SIGTERM: to stop them means to kill them.
    """

    def __init__(self, server: Processes, policy: WatchPolicy) -> None:
        super().__init__(server, policy.stop_at)
        self.policy = policy
        self.dismissed: frozenset[int] = frozenset()
        self.dismiss_at = NEVER
        self.spared: frozenset[int] = frozenset()
        self.hang: Hang | None = None
        self.stalled: dict[int, str | None] = {}
        self.dying: frozenset[int] = frozenset()  # the others go on without them already
        self.stands: Mapping[int, ProcessState] = {}
        self.awake_since = self.looked_at = time.monotonic()
        if policy.heartbeats is not None:
            self.stop_signal = signal.SIGKILL

    def start(self, process: Process) -> None:
        """Start a process; what became of one that had its number before is forgotten."""
        self.spared -= {process.rank}
        self.dismissed -= {process.rank}
        if self.policy.heartbeats is not None:  # the last beat of the one before may be old
            self.policy.heartbeats.clear(process.rank)
        self.alive[self.server.spawn(process, self.policy.heartbeats)] = process.rank

    def dismiss(self, ranks: Collection[int]) -> None:
        """Kill these processes, without which the job goes on: their end is no fault."""
        self.dismissed |= frozenset(ranks)
        self._signal(signal.SIGKILL, ranks)

    def look_for_the_dying(self, ranks: Collection[int]) -> frozenset[int]:
        """Those of `ranks` that were found to die just now, and that the job can lose.

        They are in `dying` until their exit is told, and are lost then, whatever has become of the
        others.
        """
        if self.stopped or (self.stop_at < NEVER and not self.reason):
            return frozenset()
        ends = {self.alive[ticket] for ticket in self.server.dying() & self.alive.keys()}
        remaining, policy = frozenset(self.alive.values()) - ends, self.policy
        failed = (ends & set(ranks)) - self.dying
        failed = {rank for rank in failed if not policy.ended_well(rank)}
        new = frozenset(rank for rank in failed if policy.may_lose(rank, remaining))
        self.dying |= new
        return new

    @property
    def ends(self) -> str:
        """Why the processes leave, or are being stopped; "" while they go on."""
        if self.reason:
            return f"the job was asked to stop ({self.reason})"
        is_stopped = bool(self.stopped) or self.stop_at < NEVER
        return "a rank has failed, and all are stopped" if is_stopped else ""

    def stops_others_after_s(self, rank: int, ended: Exit) -> float:
        if rank in self.stalled:
            ended = self.exits[rank] = replace(ended, memory=self.stalled.pop(rank))
        is_spared = self._is_fine(rank, ended) or self._restarts(rank, ended)
        if is_spared or self._tolerates_exit(rank, ended):
            return NEVER
        has_stacks = self.policy.heartbeats is not None and not self.stands
        if ended.code == -signal.SIGABRT and has_stacks:
            self.stands = self.server.stands({r: t for t, r in self.alive.items()})
        return self.policy.evidence_s

    def _is_fine(self, rank: int, ended: Exit) -> bool:
        """Whether this process ended well; if it is the leader, its helpers are dismissed."""
        if rank in self.dismissed:
            return True
        if rank != LEADER or not self.policy.helpers:
            return ended.code == 0 or self.policy.ended_well(rank)
        if not self.policy.ended_well(rank):  # failed, even with exit code 0
            return False
        self.dismissed = self.policy.helpers & set(self.alive.values())
        self.dismiss_at = time.monotonic() + HELPERS_S
        return True

    def _restarts(self, rank: int, ended: Exit) -> bool:
        """Start a process in the place of a failed one, if the policy has one; whether it did."""
        if ended.lost or self.stopped or self.reason:
            return False
        process = self.policy.again(rank, ended)
        if process is not None:
            self.policy.on_lost(rank, ended)
            self.start(process)
        return process is not None

    def _tolerates_exit(self, rank: int, ended: Exit) -> bool:
        """Whether the others go on without this process, which failed.

        False if its whole node is lost, because peers blocked on it would hang. Roles that detect
        lost nodes themselves are in `outlive_nodes`.
        """
        if rank in self.dying:
            self.dying -= {rank}
            self.spared |= {rank}
            self.policy.on_lost(rank, ended)
            return True
        remaining = frozenset(self.alive.values()) - self.gone
        if ended.lost and rank not in self.policy.outlive_nodes:
            return False
        if not self.policy.may_lose(rank, remaining):
            return False
        if not self.stopped:
            self.spared |= {rank}
            self.policy.on_lost(rank, ended)
        return True

    def pass_on(self, signals: Signals) -> None:
        if self.policy.heartbeats is not None and signals.take_saves():
            self.policy.heartbeats.ask_to_save()

    def ask_to_stop(self, signals: Signals) -> None:
        """Ranks with a heartbeat have time to commit a checkpoint; others are stopped now."""
        self.stop_at = time.monotonic()
        if self.policy.heartbeats is not None:
            self.policy.heartbeats.ask_to_stop()
            self.stop_at += COMMIT_S

    def look_for_a_hang(self) -> None:
        """If the ranks make no progress, record the stack of each and kill them all.

        Time in which this machine was suspended does not count.
        """
        now = time.monotonic()
        if now - self.looked_at > SUSPENDED_S:
            self.awake_since = now
        self.looked_at = now
        heartbeats, timeout_s = self.policy.heartbeats, self.policy.hang_timeout_s
        if heartbeats is None or not timeout_s or self.hang or self.stopped:
            return
        if self.server.is_silent():  # ranks that wait for a lost node do not hang: report the node
            return
        there = {rank: t for t, rank in self.alive.items() if self.server.started(t)}
        there = {r: t for r, t in there.items() if r not in self.stalled and r not in self.dying}
        beats, stands = heartbeats.read(), lambda: self.server.stands(there)
        hang = find_hang(beats, there, timeout_s, self.awake_since, stands)
        if hang is not None and not self._tolerates_hang(hang):
            self.hang = hang
            self._kill_after(0.0)

    def _tolerates_hang(self, hang: Hang) -> bool:
        """Whether the job can go on without the hung ranks; if so, kill only those."""
        remaining = frozenset(self.alive.values()) - set(hang.missing)
        may_lose = self.policy.may_lose
        if not hang.missing or not all(may_lose(rank, remaining) for rank in hang.missing):
            return False
        for rank in hang.missing:
            self.stalled[rank] = f"it stood still {hang.describe(rank)}, and was killed"
        self._signal(signal.SIGKILL, hang.missing)
        return True

    def stop_if_due(self) -> None:
        super().stop_if_due()
        if time.monotonic() >= self.dismiss_at:
            self._signal(signal.SIGKILL, self.dismissed)
            self.dismiss_at = NEVER


# --- signals -------------------------------------------------------------------------------------
# The signals that the supervisor obeys: noted while a job runs, never raised in mid-message.


class Signals:
    """Between entering and leaving, these signals are noted for the supervisor to ask about.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 (what schedulers send before the time is over) ask to stop;
    SIGINT a second time insists. SIGUSR2 asks for a checkpoint. Only the main thread of a process
    can take signals; elsewhere nothing is changed.
    """

    STOP: tuple[signal.Signals, ...] = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
    )
    reason = ""
    insists = False

    def __init__(self) -> None:
        self._received: deque[int] = deque()

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (*Signals.STOP, signal.SIGUSR2):
                before = signal.getsignal(number)
                if before is None:
                    continue  # it is not Python's, which could not give it back
                if number == signal.SIGHUP and before == signal.SIG_IGN:
                    continue  # nohup: the job is to outlive its terminal
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        self._received.append(number)
        self.insists |= number == signal.SIGINT and self.reason != ""
        if number in self.STOP:
            self.reason = self.reason or signal.Signals(number).name

    def received(self) -> list[int]:
        """Signals received since the last call."""
        return [self._received.popleft() for _ in range(len(self._received))]

    def take_saves(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        return signal.SIGUSR2 in self.received()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


# --- hang ----------------------------------------------------------------------------------------
# Which rank the others wait for, from heartbeats and stacks.
#
# A rank in a collective waits for others. The missing ranks are those that do not wait. If all
# wait, they are the ranks whose user code called a collective while the others are in one of the
# engine, or else the ranks whose count of collectives does not fit their step. The ranks write
# their stacks themselves.


STATES = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "R": "running: computing, or in an endless loop",
    "D": "waiting for a disk or a network file system",
    "S": "sleeping",
}


@dataclass(frozen=True)
class Hang:
    """Every rank's last beat and stack, and which ranks are missing."""

    timeout_s: float
    when: float
    beats: dict[int, Beat]
    missing: tuple[int, ...]
    states: dict[int, str]
    stacks: dict[int, str]

    def describe(self, rank: int) -> str:
        """Where one rank is, in a sentence without its stack."""
        beat = self.beats[rank]
        where = f"`{beat.phase}`" + (f" of step {beat.step}" if beat.step >= 0 else "")
        state = STATES.get(self.states[rank], f"state {self.states[rank]}")
        since = self.when - beat.since
        place = place_of_users_collective(self.stacks[rank])
        called = f"; called by {place}" if place else ""
        text = f"in {where} for {since:.1f} s, after {beat.collectives} collectives; {state}"
        return text + called

    def __str__(self) -> str:
        """All ranks with their stacks, the missing ones first."""
        others = [rank for rank in sorted(self.beats) if rank not in self.missing]
        parts = [
            f"rank {rank}{' (missing)' if rank in self.missing else ''}: {self.describe(rank)}\n"
            f"{self.stacks[rank] or 'it wrote no stack'}"
            for rank in (*self.missing, *others)
        ]
        return "\n".join(parts)


def find_hang(
    beats: list[Beat],
    ranks: Collection[int],
    timeout_s: float,
    awake_since: float,
    stands: Callable[[], dict[int, ProcessState]],
) -> Hang | None:
    """The hang of the living `ranks`, or `None` if there is none.

    A job hangs if a rank outside a collective has made no progress for `timeout_s`, or if no rank
    has. Time before `awake_since` does not count. `stands` asks the ranks for their stacks.
    """
    now = time.monotonic()
    living = {beat.rank: beat for beat in beats if beat.rank in ranks}
    still = {
        rank for rank, beat in living.items() if now - max(beat.since, awake_since) > timeout_s
    }
    at_fault = {rank for rank in still if not _waits(living[rank])}
    if not living or not (at_fault or len(still) == len(living)):
        return None
    states_of = stands()
    states = {rank: states_of[rank].state if rank in states_of else "" for rank in living}
    stacks = {rank: states_of[rank].stacks if rank in states_of else "" for rank in living}
    called = {rank for rank, stack in stacks.items() if place_of_users_collective(stack)}
    if at_fault or len(called) == len(living):
        called = set()
    missing = ranks_waited_for(living, at_fault or called)
    return Hang(timeout_s, now, living, missing, states, stacks)


def _waits(beat: Beat) -> bool:
    """Whether a rank waits for others, itself or in its thread that saves."""
    return beat.phase == "exchange" or (beat.phase == "save" and beat.save_waits)


def ranks_waited_for(beats: dict[int, Beat], at_fault: set[int]) -> tuple[int, ...]:
    """The ranks that the others wait for: those `at_fault`, or those that skipped a collective."""
    if at_fault:
        return tuple(sorted(at_fault))
    fewest = min(beat.collectives for beat in beats.values())
    behind = [beat for beat in beats.values() if beat.collectives == fewest]
    furthest = max(beat.step for beat in behind)  # same count at a later step: one was skipped
    awaited = sorted(beat.rank for beat in behind if beat.step == furthest)
    return tuple(awaited) if len(awaited) < len(beats) else ()


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.M)
_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"
_PUBLIC = re.compile(r"/(?:trainer|comm)\.py$")  # what a task may call, of this package
_CALLS_A_MODULE = "/torch/nn/modules/module.py"
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def place_of_users_collective(stack: str) -> str:
    """`mytask.py line 14 in loss`: the user's line that called a collective; "" if none did.

    It is a collective of torch, or a method of the trainer that all ranks call. A collective in
    the forward pass of a module counts as the engine's.
    """
    for thread in _THREAD.split(stack):
        frames = [match.groupdict() for match in _FRAME.finditer(thread)]
        if "most recent call last" in thread:
            frames.reverse()
        has_torch, inner = False, ""
        for frame in frames:
            file = frame["file"]
            has_torch = has_torch or "/torch/distributed/" in file
            if file.endswith(_CALLS_A_MODULE):
                break
            if not (file.startswith(_PACKAGE_FOLDER) or any(p in file for p in _INSTALLED)):
                is_own = inner.startswith(_PACKAGE_FOLDER)
                if _PUBLIC.search(inner) if is_own else has_torch:
                    return f"{file} line {frame['line']} in {frame['name']}"
                break
            inner = file
    return ""
