"""The supervisor starts, watches and stops every process of a job. It knows no framework.

The first failure or a hang stops all ranks, except roles the job can lose (`WatchPolicy.may_lose`).
Ctrl-C, SIGTERM and the time limit ask ranks with a heartbeat to commit a checkpoint and leave, and
stop the others. Processes that only serve the leader are ended when it is done. It returns when
every process has ended. `fault_report` decides which rank failed first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Self

from allranks.errors import PlaceError
from allranks.launcher.hang import Hang, find_hang
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.processes.process import Exit, Process, Processes, ProcessState
from allranks.launcher.signals import Signals
from allranks.strategies.roles import LEADER

TICK_S = 0.1
EVIDENCE_S = 0.2
GRACE_S = 1.5
HELPERS_S = 1.0  # for helpers to write their last events and end, after their leader has
COMMIT_S = 120.0
SUSPENDED_S = 1.0
NEVER = float("inf")


@dataclass(frozen=True)
class WatchPolicy:
    """How processes with a heartbeat are watched.

    `hang_timeout_s` 0 waits for ever; `stop_at` is on the monotonic clock. `ended_well(rank)` says
    whether a process with a bad exit code had completed its work. After the first fault the
    supervisor waits `evidence_s` before it stops the others: a victim may end before the cause.

    `may_lose(rank, remaining)` says whether the `remaining` ranks go on without one that failed;
    `on_lost` is called then. Ranks in `outlive_nodes` may also be lost with their node.
    `again(rank, exit)` is the process that replaces a failed one while the others go on, or `None`.
    `helpers` never end by themselves: they are ended when rank 0 has ended well.
    """

    heartbeats: HeartbeatTable
    hang_timeout_s: float = 0.0
    stop_at: float = NEVER
    evidence_s: float = EVIDENCE_S
    ended_well: Callable[[int], bool] = lambda rank: False
    may_lose: Callable[[int, Collection[int]], bool] = lambda rank, remaining: False
    outlive_nodes: frozenset[int] = frozenset()
    again: Callable[[int, Exit], Process | None] = lambda rank, exit_: None
    on_lost: Callable[[int, Exit], None] = lambda rank, exit_: None
    helpers: frozenset[int] = frozenset()


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
    with ExitStack() as stack:
        signals = signals or stack.enter_context(Signals())
        watch = stack.enter_context(_WatchedProcesses(server, policy))
        for process in processes:
            watch.start(process)
        while watch.alive:
            watch.take_exits()
            on_tick()
            watch.look_for_a_hang()
            watch.handle_signals(signals)
            watch.kill_if_due()
    names = {process.rank: process.name for process in processes if process.name}
    stopped = watch.stopped | watch.dismissed
    return Ended(watch.exits, stopped, watch.reason, watch.hang, watch.spared, names, watch.stands)


@dataclass
class _WatchedProcesses:
    """The processes of one `supervise`, and the deadlines for stopping and killing them."""

    server: Processes
    policy: WatchPolicy | None
    alive: dict[int, int] = field(default_factory=dict)  # ticket -> rank
    exits: dict[int, Exit] = field(default_factory=dict)
    stopped: frozenset[int] = frozenset()
    dismissed: frozenset[int] = frozenset()
    spared: frozenset[int] = frozenset()
    reason: str = ""
    hang: Hang | None = None
    stalled: dict[int, str | None] = field(default_factory=dict)
    stands: Mapping[int, ProcessState] = field(default_factory=dict)
    stop_at: float = NEVER
    kill_at: float = NEVER
    dismiss_at: float = NEVER

    def __post_init__(self) -> None:
        self.awake_since = self.looked_at = time.monotonic()

    def start(self, process: Process) -> None:
        heartbeats = None if self.policy is None else self.policy.heartbeats
        ticket = self.server.spawn(process, heartbeats)
        self.alive[ticket] = process.rank

    def take_exits(self) -> None:
        """Wait briefly for exits; after a fault the others are stopped soon."""
        exits = self.server.exits(TICK_S)
        if not exits:
            self.server.wake()
        for ended in exits:
            if ended.ticket not in self.alive:
                continue
            rank = self.alive.pop(ended.ticket)
            ended = replace(ended, memory=self.stalled.pop(rank, ended.memory))
            self.exits[rank] = ended
            is_spared = self._is_fine(rank, ended) or self._restarts(rank, ended)
            if not (is_spared or self._tolerates_exit(rank, ended)):
                if ended.code == -signal.SIGABRT and self.policy is not None and not self.stands:
                    self.stands = self.server.stands({r: t for t, r in self.alive.items()})
                evidence_s = EVIDENCE_S if self.policy is None else self.policy.evidence_s
                self.stop_at = min(self.stop_at, time.monotonic() + evidence_s)

    def _is_fine(self, rank: int, ended: Exit) -> bool:
        """Whether this process ended well; if it is the leader, its helpers are dismissed."""
        if self.policy is None or rank in self.dismissed:
            return self.policy is not None or ended.code == 0
        if rank != LEADER or not self.policy.helpers:
            return ended.code == 0 or self.policy.ended_well(rank)
        if not self.policy.ended_well(rank):  # failed, even with exit code 0
            return False
        self.dismissed = self.policy.helpers & set(self.alive.values())
        self.dismiss_at = time.monotonic() + HELPERS_S
        return True

    def _restarts(self, rank: int, ended: Exit) -> bool:
        """Start a process in the place of a failed one, if the policy has one; whether it did."""
        if self.policy is None or ended.lost or self.stopped or self.reason:
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
        remaining = frozenset(self.alive.values())
        if self.policy is None or (ended.lost and rank not in self.policy.outlive_nodes):
            return False
        if not self.policy.may_lose(rank, remaining):
            return False
        if not self.stopped:
            self.spared |= {rank}
            self.policy.on_lost(rank, ended)
        return True

    def look_for_a_hang(self) -> None:
        """If the ranks make no progress, record the stack of each and kill them all.

        Time in which this machine was suspended does not count.
        """
        now = time.monotonic()
        if now - self.looked_at > SUSPENDED_S:
            self.awake_since = now
        self.looked_at = now
        if self.policy is None or not self.policy.hang_timeout_s or self.hang or self.stopped:
            return
        if self.server.is_silent():  # ranks that wait for a lost node do not hang: report the node
            return
        there = {rank: t for t, rank in self.alive.items() if self.server.started(t)}
        there = {rank: t for rank, t in there.items() if rank not in self.stalled}
        self.hang = find_hang(
            self.policy.heartbeats.read(),
            there,
            self.policy.hang_timeout_s,
            self.awake_since,
            lambda: self.server.stands(there),
        )
        if self.hang is not None and self._tolerates_hang(self.hang):
            self.hang = None
        if self.hang is not None:
            self.stopped = frozenset(self.alive.values())
            self.kill_at = 0.0

    def _tolerates_hang(self, hang: Hang) -> bool:
        """Whether the job can go on without the hung ranks; if so, kill only those."""
        assert self.policy is not None
        remaining = frozenset(self.alive.values()) - set(hang.missing)
        may_lose = self.policy.may_lose
        if not hang.missing or not all(may_lose(rank, remaining) for rank in hang.missing):
            return False
        for rank in hang.missing:
            self.stalled[rank] = f"it stood still {hang.describe(rank)}, and was killed"
        self._signal(signal.SIGKILL, hang.missing)
        return True

    def handle_signals(self, signals: Signals) -> None:
        """React to signals and the time limit: ask ranks with a heartbeat first, then stop all."""
        now = time.monotonic()
        if self.policy is not None and signals.take_saves():
            self.policy.heartbeats.ask_to_save()
        reason = signals.reason or self.server.stop_reason()
        if not reason and self.policy is not None and now >= self.policy.stop_at:
            reason = "time limit"
        if reason and not self.reason:
            self.reason = reason
            self.stop_at = now
            if self.policy is not None:
                self.policy.heartbeats.ask_to_stop()
                self.stop_at = now + COMMIT_S
        if signals.insists:
            self.stop_at = 0.0

    def kill_if_due(self) -> None:
        now = time.monotonic()
        if now >= self.stop_at and not self.stopped:
            self.stopped = frozenset(self.alive.values())
            # ranks with a heartbeat were asked through it, or are victims: they ignore SIGTERM
            self._signal(signal.SIGTERM if self.policy is None else signal.SIGKILL)
            self.stop_at, self.kill_at = NEVER, now + GRACE_S
        if now >= self.kill_at:
            self._signal(signal.SIGKILL)
            self.kill_at = now + GRACE_S
        if now >= self.dismiss_at:
            self._signal(signal.SIGKILL, self.dismissed)
            self.dismiss_at = NEVER

    def _signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those of `ranks` that are alive; `None`: to all."""
        for ticket, rank in self.alive.items():
            if ranks is None or rank in ranks:
                self.server.signal(ticket, number)
                self.server.signal(ticket, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        reap(self.server, self.alive, kill=error is not None)


def reap(server: Processes, alive: dict[int, int], *, kill: bool) -> None:
    """Wait until the processes `alive` (ticket -> rank) have ended; `kill` them first if asked.

    If the server has died, its processes have died with it.
    """
    with suppress(PlaceError):
        if kill:
            for ticket in alive:
                server.signal(ticket, signal.SIGKILL)
        while alive:
            for ended in server.exits(TICK_S):
                alive.pop(ended.ticket, None)
