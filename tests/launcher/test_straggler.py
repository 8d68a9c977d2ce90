"""Stragglers: told with rank, host and phase, once; a small or short difference is none."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.job.run_folder import JsonLines, read_rows
from allranks.launcher.heartbeat import (
    FEWEST_STEPS,
    LEAST_S,
    PHASES,
    Beat,
    Heartbeat,
    HeartbeatTable,
    Stragglers,
    slower,
)

STEPS = 10
HOSTS = ("node0", "")  # "": this one


def beats(step: int, *seconds: tuple[float, float]) -> list[Beat]:
    """Ranks that have worked so many seconds in all on data and on computing."""
    found = []
    for rank, (data, compute) in enumerate(seconds):
        spent = {**dict.fromkeys(PHASES, 0.0), "data": data, "compute": compute}
        found.append(Beat(rank, 0, step, "exchange", 0.0, 0, spent))
    return found


def found(*seconds: tuple[float, float], steps: int = STEPS) -> list[tuple[int, str]]:
    start = beats(0, *((0.0, 0.0) for _ in seconds))
    return [(rank, phase) for rank, phase, _, _ in slower(start, beats(steps, *seconds))]


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ([(0.1, 1.0), (0.1, 1.0), (0.1, 1.0)], []),
        ([(0.1, 1.0), (0.1, 3.0), (0.1, 1.0)], [(1, "compute")]),
        ([(2.0, 1.0), (0.1, 1.0), (0.1, 1.0)], [(0, "data")]),
        ([(2.0, 1.0), (0.1, 1.0), (0.1, 3.0)], [(0, "data"), (2, "compute")]),
        ([(0.1, 1.0), (0.1, 1.9)], []),  # less than twice
        ([(0.0, 0.0), (0.0, 0.04)], []),  # a great deal more, of nothing
        ([(0.1, 3.0), (0.1, 1.0)], [(0, "compute")]),
        ([(0.1, 3.0)], None),
    ],
)
def test_the_one_that_works_longer_is_named_with_its_phase(
    seconds: list[tuple[float, float]], named: list[tuple[int, str]] | None
) -> None:
    if named is not None:
        assert found(*seconds) == named


def test_waiting_is_not_work() -> None:
    start, now = (beats(step, (0.0, 1.0 * bool(step)), (0.0, 1.0 * bool(step))) for step in (0, 10))
    now[0].seconds["exchange"] = 50.0
    assert slower(start, now) == []


def test_a_few_steps_tell_nothing() -> None:
    slow = [(0.0, 0.1), (0.0, 9.0)]
    assert found(*slow, steps=FEWEST_STEPS - 1) == []
    assert found(*slow, steps=FEWEST_STEPS) == [(1, "compute")]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=8))
def test_only_ranks_slower_than_the_usual_one_are_named(spent: list[float]) -> None:
    for rank, phase, own_s, usual_s in slower(
        beats(0, *((0.0, 0.0) for _ in spent)), beats(STEPS, *((0.0, s) for s in spent))
    ):
        assert phase == "compute" and own_s == spent[rank] / STEPS
        assert own_s > 2 * usual_s and own_s - usual_s > LEAST_S
        assert sum(s / STEPS >= own_s for s in spent) <= len(spent) // 2 + 1


def test_each_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("allranks.launcher.supervisor.time.monotonic", lambda: now[0])
    monkeypatch.setattr("allranks.launcher.heartbeat.time.monotonic", lambda: now[0])
    path = tmp_path / "events.jsonl"
    with closing(HeartbeatTable(2)) as heartbeats, JsonLines(path) as events:
        ranks = [Heartbeat(heartbeats.fd, rank) for rank in range(2)]
        looks = Stragglers(heartbeats, events, HOSTS)
        for step in range(20):
            for rank, heartbeat in enumerate(ranks):
                heartbeat.at_step(step)
                heartbeat.enter("data")
                now[0] += 0.5 if rank else 0.01
                heartbeat.enter("compute")
                heartbeat.enter("exchange")
            looks.look()
    (told,) = read_rows(path)
    assert (told["event"], told["rank"], told["phase"]) == ("straggler", 1, "data")
    assert told["host"] == socket.gethostname()
    assert told["seconds_per_step"] > 10 * told["usual_seconds_per_step"] > 0


def test_steps_that_are_longer_than_the_looks_are_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("allranks.launcher.supervisor.time.monotonic", lambda: now[0])
    monkeypatch.setattr("allranks.launcher.heartbeat.time.monotonic", lambda: now[0])
    path = tmp_path / "events.jsonl"
    with closing(HeartbeatTable(2)) as heartbeats, JsonLines(path) as events:
        ranks = [Heartbeat(heartbeats.fd, rank) for rank in range(2)]
        looks = Stragglers(heartbeats, events, HOSTS)
        for step in range(12):
            for rank, heartbeat in enumerate(ranks):
                heartbeat.at_step(step)
                heartbeat.enter("compute")
                now[0] += 60.0 if rank else 10.0
                heartbeat.enter("exchange")
                looks.look()
    assert [(row["rank"], row["phase"]) for row in read_rows(path)] == [(1, "compute")]


def test_one_rank_alone_is_no_straggler(tmp_path: Path) -> None:
    with closing(HeartbeatTable(1)) as heartbeats, JsonLines(tmp_path / "events.jsonl") as events:
        looks = Stragglers(heartbeats, events, HOSTS)
        looks._next = 0.0
        looks.look()
    assert list(read_rows(tmp_path / "events.jsonl")) == []
