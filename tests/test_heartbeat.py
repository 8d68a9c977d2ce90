"""The heartbeat: what a rank says is what the supervisor reads, whole, and back;
no name is left."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.launcher.heartbeat import PHASES, Heartbeat, HeartbeatTable


@pytest.fixture
def heartbeats() -> Iterator[HeartbeatTable]:
    with closing(HeartbeatTable(3)) as made:
        yield made


def in_a_child(what: Callable[[], None]) -> int:
    """Run something in a forked process, as ranks are; returns its exit code."""
    child = os.fork()
    if child == 0:
        try:
            what()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_before_any_rank_has_come_all_are_at_the_start(heartbeats: HeartbeatTable) -> None:
    for beat in heartbeats.read():
        assert (beat.phase, beat.beats, beat.collectives) == ("start", 0, 0)
        assert 0 < beat.since <= time.monotonic(), "the time of a process counts from its start"


def test_a_rank_sees_the_step_of_another(heartbeats: HeartbeatTable) -> None:
    other = Heartbeat(heartbeats.fd, 2)
    assert other.step_of(0) == -1
    Heartbeat(heartbeats.fd, 0).at_step(7)
    assert (other.step_of(0), other.step_of(2)) == (7, -1)


def test_what_each_rank_says_is_read_as_its_own(heartbeats: HeartbeatTable) -> None:
    begun = time.monotonic()
    ranks = [Heartbeat(heartbeats.fd, rank) for rank in range(3)]
    for rank, heartbeat in enumerate(ranks):
        heartbeat.at_step(10 + rank)
        assert heartbeat.enter("data") == "start"
        assert heartbeat.enter(PHASES[2 + rank]) == "data"
        for _ in range(rank):
            heartbeat.collective()
    now = time.monotonic()
    for rank, beat in enumerate(heartbeats.read()):
        assert (beat.rank, beat.step, beat.phase) == (rank, 10 + rank, PHASES[2 + rank])
        assert (beat.beats, beat.collectives) == (2, rank)
        assert begun <= beat.since <= now


def test_a_rank_that_came_and_has_no_step_says_so(heartbeats: HeartbeatTable) -> None:
    Heartbeat(heartbeats.fd, 1)
    assert heartbeats.read()[1].step == -1 and heartbeats.read()[1].since > 0


def test_time_is_counted_for_the_phase_that_it_was_spent_in(
    heartbeats: HeartbeatTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("allranks.launcher.heartbeat.time.monotonic", lambda: now[0])
    heartbeat = Heartbeat(heartbeats.fd, 2)
    for phase, spent in (("data", 1.0), ("compute", 2.0), ("data", 4.0), ("exchange", 8.0)):
        now[0] += spent
        heartbeat.enter(phase)
    seconds = {"start": 1.0, "data": 10.0, "compute": 4.0}
    wanted = {phase: seconds.get(phase, 0.0) for phase in PHASES}
    assert heartbeat.seconds == heartbeats.read()[2].seconds == wanted, "exchange still goes on"


def test_a_fork_writes_into_the_same_memory(heartbeats: HeartbeatTable) -> None:
    def beats() -> None:
        heartbeat = Heartbeat(heartbeats.fd, 1)
        heartbeat.at_step(7)
        heartbeat.enter("evaluate")

    assert in_a_child(beats) == 0
    beat = heartbeats.read()[1]
    assert (beat.step, beat.phase) == (7, "evaluate")
    assert heartbeats.read()[0].beats == 0


def test_the_thread_that_saves_says_when_it_waits_and_nothing_else(
    heartbeats: HeartbeatTable,
) -> None:
    heartbeat = Heartbeat(heartbeats.fd, 1)
    heartbeat.enter("save")
    aside, before = heartbeat.for_save_thread(), heartbeats.read()[1]
    assert aside.enter("exchange") == "save"
    assert heartbeats.read()[1] == dataclasses.replace(before, save_waits=True)
    aside.collective()
    assert aside.enter("save") == "save"
    assert heartbeats.read()[1] == before


def test_what_the_supervisor_wants_reaches_every_rank(heartbeats: HeartbeatTable) -> None:
    ranks = [Heartbeat(heartbeats.fd, rank) for rank in range(3)]
    assert not any(heartbeat.wants_stop or heartbeat.wants_save() for heartbeat in ranks)
    heartbeats.ask_to_save()
    heartbeats.ask_to_save()
    assert [heartbeat.wants_save() for heartbeat in ranks] == [True] * 3, "asked twice, saved once"
    assert not any(heartbeat.wants_save() for heartbeat in ranks)
    assert not any(heartbeat.wants_stop for heartbeat in ranks)
    heartbeats.ask_to_save()
    heartbeats.ask_to_stop()
    assert all(heartbeat.wants_save() and heartbeat.wants_stop for heartbeat in ranks)
    assert all(heartbeat.wants_stop for heartbeat in ranks), "until it has stopped"


def test_it_reaches_a_fork(heartbeats: HeartbeatTable) -> None:
    def hears() -> None:
        heartbeat = Heartbeat(heartbeats.fd, 2)
        signal.alarm(30)
        while not heartbeat.wants_stop:
            pass

    heartbeats.ask_to_stop()
    assert in_a_child(hears) == 0


def test_without_a_supervisor_nobody_wants_anything() -> None:
    heartbeat = Heartbeat(-1, 5)  # whatever rank it is
    heartbeat.at_step(3)
    assert heartbeat.enter("compute") == "start" and heartbeat.enter("data") == "compute"
    assert not heartbeat.wants_stop and not heartbeat.wants_save()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(PHASES), st.integers(-1, 2**53)), max_size=40
    )
)
def test_a_rank_never_writes_into_the_row_of_another(said: list[tuple[int, str, int]]) -> None:
    with closing(HeartbeatTable(4)) as heartbeats:
        ranks = [Heartbeat(heartbeats.fd, rank) for rank in range(4)]
        wanted = {rank: ("start", -1, 0) for rank in range(4)}
        for rank, phase, step in said:
            ranks[rank].enter(phase)
            ranks[rank].at_step(step)
            wanted[rank] = phase, step, wanted[rank][2] + 1
        found = {b.rank: (b.phase, b.step, b.beats) for b in heartbeats.read()}
        assert found == wanted
        assert not any(rank.wants_stop or rank.wants_save() for rank in ranks)
