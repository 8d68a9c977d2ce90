"""What `run` does at which moment, before a fake owner of processes that ends them one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import PlaceError
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.processes.process import Exit, Process, ProcessState
from allranks.launcher.scripts.supervise import (
    ForwardedSignals,
    ScriptsEnded,
    StopPolicy,
    _descendants,
    supervise_script,
)
from allranks.launcher.supervisor import WatchPolicy, supervise

LONG_S = 1e6
Ends = list[list[tuple[int, int]]]


class Fake:
    """Owns nothing: `ends` says, look by look, which tickets end with which code.

    What it is sent after the last look is answered: every process that is left dies of it.
    """

    def __init__(self, ends: Ends) -> None:
        self.ends, self.sent = list(ends), list[tuple[int, int, int]]()
        self.alive, self.looks, self.said = set[int](), 0, ""

    def spawn(self, process: Process, heartbeats: HeartbeatTable | None = None) -> int:
        self.alive.add(process.rank)
        return process.rank

    def exits(self, timeout_s: float) -> list[Exit]:
        self.looks += 1
        now = self.ends.pop(0) if self.ends else []
        if not self.ends and not now:
            fatal = {ticket: -number for _, ticket, number in self.sent if number != signal.SIGCONT}
            now = [(ticket, fatal[ticket]) for ticket in sorted(self.alive & set(fatal))]
        self.alive -= {ticket for ticket, _ in now}
        return [Exit(ticket, code, float(self.looks)) for ticket, code in now]

    def signal(self, ticket: int, number: int) -> None:
        if ticket in self.alive:
            self.sent.append((self.looks, ticket, number))

    def started(self, ticket: int) -> bool:
        return ticket in self.alive

    def stands(self, tickets: Mapping[int, int]) -> dict[int, ProcessState]:
        return {}

    def wake(self) -> None:
        """Nobody has stopped it."""

    def is_silent(self) -> bool:
        return False

    def messages(self) -> list[int]:
        return []

    def stop_reason(self) -> str:
        said, self.said = self.said, ""
        return said


def attended(
    server: Fake, tick: Callable[[], None] = lambda: None, ranks: int = 3, **policy: Any
) -> ScriptsEnded:
    policy = {
        "deciding": frozenset(range(ranks)),
        "leaving": frozenset(),
        "grace_s": 0.0,
    } | policy
    given = StopPolicy(**policy)
    processes = [Process(rank, "", None, {}, Path("nowhere")) for rank in range(ranks)]
    return supervise_script(server, processes, given, ForwardedSignals(), tick)


def test_after_the_first_fault_the_cause_has_time_to_show() -> None:
    """Rank 0 dies of what rank 1 did, and is heard of first: nobody is told anything yet."""
    server = Fake([[(0, 1)], [], [(1, 3)], [(2, 0)]])
    ended = attended(server, evidence_s=LONG_S)
    assert {rank: one.code for rank, one in ended.exits.items()} == {0: 1, 1: 3, 2: 0}
    assert server.sent == [] and ended.stopped == frozenset()


def test_when_that_time_is_over_the_others_are_stopped() -> None:
    server = Fake([[(0, 1)]])
    ended = attended(server, evidence_s=0.0)
    assert {rank: one.code for rank, one in ended.exits.items()} == {
        0: 1,
        1: -signal.SIGTERM,
        2: -signal.SIGTERM,
    }
    assert ended.stopped == {1, 2} and not ended.done


def test_a_fault_after_somebody_asked_to_stop_starts_no_second_end() -> None:
    """Who was asked to leave may leave with any code, in its grace."""
    server = Fake([[], [(0, 7)], [], [(1, 0), (2, 0)]])
    server.said = "node n2 got SIGTERM"
    ended = attended(server, grace_s=LONG_S, evidence_s=0.0)
    assert {number for _, _, number in server.sent} == {signal.SIGTERM, signal.SIGCONT}
    assert {look for look, *_ in server.sent} == {1}, "told once"
    assert ended.reason == "node n2 got SIGTERM"


def test_a_script_that_was_told_to_stop_is_not_told_again_when_another_ends() -> None:
    """A second SIGTERM would end it in the middle of what it does at the first."""
    server = Fake([[(0, 1)], [(1, -signal.SIGTERM)], [], [(2, 0)]])
    ended = attended(server, evidence_s=0.0)
    assert [(look, number) for look, ticket, number in server.sent if ticket == 2] == [
        (1, signal.SIGTERM),
        (1, signal.SIGCONT),
    ]
    assert ended.stopped == {1, 2}


def test_servers_end_when_those_whom_they_serve_are_done() -> None:
    server = Fake([[(0, 0)], []])
    ended = attended(server, ranks=2, deciding=frozenset({0}), leaving=frozenset({1}))
    assert ended.done and ended.exits[1].code == -signal.SIGTERM


def test_what_it_is_told_by_another_node_is_passed_on() -> None:
    server = Fake([[], [], [(0, 0)]])
    heard = [[signal.SIGUSR1], []]
    server.messages = lambda: heard.pop(0) if heard else []  # type: ignore[method-assign, return-value]
    ended = attended(server, ranks=1)
    assert server.sent == [(1, 0, signal.SIGUSR1)]
    assert ended.passed_on == {signal.SIGUSR1} and not ended.reason


@pytest.mark.parametrize(("evidence_s", "stopped"), [(LONG_S, set()), (0.0, {1, 2})])
def test_the_supervisor_waits_for_the_cause_too(evidence_s: float, stopped: set[int]) -> None:
    server = Fake([[(0, 1)], [], [(1, 3)], [(2, 0)]] if evidence_s else [[(0, 1)]])
    processes = [Process(rank, "", None, {}, Path("nowhere")) for rank in range(3)]
    heartbeats = HeartbeatTable(3)
    try:
        ended = supervise(server, processes, policy=WatchPolicy(heartbeats, evidence_s=evidence_s))
    finally:
        heartbeats.close()
    assert ended.stopped == stopped
    assert {number for _, _, number in server.sent} <= {signal.SIGKILL, signal.SIGCONT}
    assert bool(server.sent) == bool(stopped), "those with a heartbeat are not asked by signals"


@pytest.mark.parametrize("of_scripts", [True, False])
def test_where_watching_breaks_every_process_is_killed_and_waited_for(of_scripts: bool) -> None:
    """And the error goes on, also where the owner of the processes is gone with them."""
    processes = [Process(rank, "", None, {}, Path("nowhere")) for rank in range(3)]

    def breaks() -> None:
        raise ZeroDivisionError

    def watched(server: Fake) -> None:
        with pytest.raises(ZeroDivisionError):
            attended(server, breaks) if of_scripts else supervise(server, processes, breaks)

    server = Fake([[(1, 0)]])
    watched(server)
    assert [(ticket, number) for _, ticket, number in server.sent] == [(0, 9), (2, 9)]
    assert not server.alive

    def is_gone(ticket: int, number: int) -> None:
        raise PlaceError("the fork server is gone")

    gone = Fake([[]])
    gone.signal = is_gone  # type: ignore[method-assign]
    watched(gone)


def test_a_process_may_end_while_its_children_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def glob(folder: Path, pattern: str) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(Path, "glob", glob)
    assert _descendants(os.getpid()) == []
