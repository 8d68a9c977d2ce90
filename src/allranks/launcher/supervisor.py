"""The supervisor starts, watches and stops every process of a job. It knows no framework.

The first failure or a hang stops all ranks, except roles the job can lose (`Care.may_lose`).
Ctrl-C, SIGTERM and the time limit ask the ranks to commit a checkpoint and leave, if they have a
heartbeat to hear it by, and stop them otherwise. Processes that only serve the leader are ended
when it is done. It returns when every process is gone. `fault_report` decides who failed first.
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
HELPERS_S = 1.0  # in which helpers say what they held, and end, once their leader has
COMMIT_S = 120.0
SUSPENDED_S = 1.0
NEVER = float("inf")


@dataclass(frozen=True)
class Care:
    """What is watched beside the exits, for processes that have a heartbeat.

    `hang_timeout_s` 0 waits for ever; `stop_at` is on the monotonic clock. `ended_well(rank)` says
    whether a process that left with a bad exit code had done its work all the same. After the first
    fault `evidence_s` pass before the others are stopped: the cause may be told after its victim.

    `may_lose(rank, left)` says whether the ranks `left` go on without one that failed; `on_lost`
    hears of it. Those that `outlive_nodes` are done without where their node is lost, too.
    `again(rank, exit)` is what is started in the place of one, while the others go on: `None` where
    nothing is. `helpers` have no end of their own: they are ended when rank 0 has ended well.
    """

    heartbeats: HeartbeatTable
    hang_timeout_s: float = 0.0
    stop_at: float = NEVER
    evidence_s: float = EVIDENCE_S
    ended_well: Callable[[int], bool] = lambda rank: False
    may_lose: Callable[[int, Collection[int]], bool] = lambda rank, left: False
    outlive_nodes: frozenset[int] = frozenset()
    again: Callable[[int, Exit], Process | None] = lambda rank, exit_: None
    on_lost: Callable[[int, Exit], None] = lambda rank, exit_: None
    helpers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Ended:
    """All processes are gone. `exits` by rank; `stopped` are the ranks that were told to stop.

    `reason` says why the job was asked to stop ("SIGTERM", "time limit"; "" if it was not).
    `spared` are the ranks that failed and were done without; `names` those of processes that have
    one. `stands` says where the others stood when one was ended by SIGABRT,
    as collectives do to it.
    """

    exits: dict[int, Exit]
    stopped: frozenset[int]
    reason: str = ""
    hang: Hang | None = None
    spared: frozenset[int] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)
    stands: Mapping[int, ProcessState] = field(default_factory=dict)

    def name_of(self, rank: int) -> str:
        """How a person knows this process."""
        return self.names.get(rank) or f"rank {rank}"

    @property
    def interrupted(self) -> bool:
        return self.reason != ""


def supervise(
    server: Processes,
    processes: list[Process],
    on_tick: Callable[[], None] = lambda: None,
    care: Care | None = None,
    signals: Signals | None = None,
) -> Ended:
    """Run all `processes` to their end; one that fails, or an interrupt, stops the rest.

    `signals` are those that the caller holds already; without it they are held meanwhile.
    """
    with ExitStack() as stack:
        signals = signals or stack.enter_context(Signals())
        watch = stack.enter_context(_WatchedProcesses(server, care))
        for process in processes:
            watch.start(process)
        while watch.alive:
            watch.take_exits()
            on_tick()
            watch.look_for_a_hang()
            watch.obey(signals)
            watch.kill_what_is_due()
    names = {process.rank: process.name for process in processes if process.name}
    stopped = watch.stopped | watch.dismissed
    return Ended(watch.exits, stopped, watch.reason, watch.hang, watch.spared, names, watch.stands)


@dataclass
class _WatchedProcesses:
    """The processes of one `supervise`, and when which of them is to be stopped or killed."""

    server: Processes
    care: Care | None
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
        ticket = self.server.spawn(process, self.care.heartbeats if self.care is not None else None)
        self.alive[ticket] = process.rank

    def take_exits(self) -> None:
        """Wait a moment for processes that end; a fault among them stops the rest soon."""
        exits = self.server.exits(TICK_S)
        if not exits:
            self.server.wake()
        for ended in exits:
            if ended.ticket not in self.alive:
                continue
            rank = self.alive.pop(ended.ticket)
            ended = replace(ended, memory=self.stalled.pop(rank, ended.memory))
            self.exits[rank] = ended
            is_spared = self._is_fine(rank, ended) or self._begins_again(rank, ended)
            if not (is_spared or self._spares(rank, ended)):
                if ended.code == -signal.SIGABRT and self.care is not None and not self.stands:
                    self.stands = self.server.stands({r: t for t, r in self.alive.items()})
                evidence_s = EVIDENCE_S if self.care is None else self.care.evidence_s
                self.stop_at = min(self.stop_at, time.monotonic() + evidence_s)

    def _is_fine(self, rank: int, ended: Exit) -> bool:
        """Whether this process ended as it should; with a leader that did its helpers end too."""
        if self.care is None or rank in self.dismissed:
            return self.care is not None or ended.code == 0
        if rank != LEADER or not self.care.helpers:
            return ended.code == 0 or self.care.ended_well(rank)
        if not self.care.ended_well(rank):  # it left its helpers without a word
            return False
        self.dismissed = self.care.helpers & set(self.alive.values())
        self.dismiss_at = time.monotonic() + HELPERS_S
        return True

    def _begins_again(self, rank: int, ended: Exit) -> bool:
        """Whether another process was started in the place of this one, which failed."""
        if self.care is None or ended.lost or self.stopped or self.reason:
            return False
        process = self.care.again(rank, ended)
        if process is not None:
            self.care.on_lost(rank, ended)
            self.start(process)
        return process is not None

    def _spares(self, rank: int, ended: Exit) -> bool:
        """Whether the others go on without this process, which failed.

        Not where its node is lost: who waits for an answer of it is not told that none will come.
        Those that are told outlive their nodes.
        """
        left = frozenset(self.alive.values())
        if self.care is None or (ended.lost and rank not in self.care.outlive_nodes):
            return False
        if not self.care.may_lose(rank, left):
            return False
        if not self.stopped:
            self.spared |= {rank}
            self.care.on_lost(rank, ended)
        return True

    def look_for_a_hang(self) -> None:
        """If the ranks show no life, take down where each of them stands, and kill them all.

        While nobody looked, because all was suspended, the ranks had no time to show any.
        """
        now = time.monotonic()
        if now - self.looked_at > SUSPENDED_S:
            self.awake_since = now
        self.looked_at = now
        if self.care is None or not self.care.hang_timeout_s or self.hang or self.stopped:
            return
        if self.server.is_silent():  # who waits for a lost node does not hang: that comes first
            return
        there = {rank: t for t, rank in self.alive.items() if self.server.started(t)}
        there = {rank: t for rank, t in there.items() if rank not in self.stalled}
        self.hang = find_hang(
            self.care.heartbeats.read(),
            there,
            self.care.hang_timeout_s,
            self.awake_since,
            lambda: self.server.stands(there),
        )
        if self.hang is not None and self._loses(self.hang):
            self.hang = None
        if self.hang is not None:
            self.stopped = frozenset(self.alive.values())
            self.kill_at = 0.0

    def _loses(self, hang: Hang) -> bool:
        """Whether those that stand still can be done without: they are killed, and none else."""
        assert self.care is not None
        left = frozenset(self.alive.values()) - set(hang.missing)
        if not hang.missing or not all(self.care.may_lose(rank, left) for rank in hang.missing):
            return False
        for rank in hang.missing:
            self.stalled[rank] = f"it stood still {hang.describe(rank)}, and was killed"
        self._signal(signal.SIGKILL, hang.missing)
        return True

    def obey(self, signals: Signals) -> None:
        """Do what signals and the time limit ask for: once politely, if there is a way to."""
        now = time.monotonic()
        if self.care is not None and signals.take_saves():
            self.care.heartbeats.ask_to_save()
        asked = signals.reason or self.server.asked()
        if not asked and self.care is not None and now >= self.care.stop_at:
            asked = "time limit"
        if asked and not self.reason:
            self.reason = asked
            self.stop_at = now
            if self.care is not None:
                self.care.heartbeats.ask_to_stop()
                self.stop_at = now + COMMIT_S
        if signals.insists:
            self.stop_at = 0.0

    def kill_what_is_due(self) -> None:
        now = time.monotonic()
        if now >= self.stop_at and not self.stopped:
            self.stopped = frozenset(self.alive.values())
            # those with a heartbeat were asked by it, or are victims: they pass over SIGTERM
            self._signal(signal.SIGTERM if self.care is None else signal.SIGKILL)
            self.stop_at, self.kill_at = NEVER, now + GRACE_S
        if now >= self.kill_at:
            self._signal(signal.SIGKILL)
            self.kill_at = now + GRACE_S
        if now >= self.dismiss_at:
            self._signal(signal.SIGKILL, self.dismissed)
            self.dismiss_at = NEVER

    def _signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send it to these of the living; `None`: to all."""
        for ticket, rank in self.alive.items():
            if ranks is None or rank in ranks:
                self.server.signal(ticket, number)
                self.server.signal(ticket, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        reap(self.server, self.alive, kill=error is not None)


def reap(server: Processes, alive: dict[int, int], *, kill: bool) -> None:
    """Wait until the processes `alive` (ticket -> rank) have ended; `kill` if watching broke.

    A server that is gone has taken them with it.
    """
    with suppress(PlaceError):
        if kill:
            for ticket in alive:
                server.signal(ticket, signal.SIGKILL)
        while alive:
            for ended in server.exits(TICK_S):
                alive.pop(ended.ticket, None)
