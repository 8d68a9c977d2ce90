"""Who is missing when nothing moves: the one that the others wait for, and no other."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.launcher.fault_report import hang_report
from allranks.launcher.heartbeat import PHASES, Beat
from allranks.launcher.processes.fork_server_client import stacks_of
from allranks.launcher.processes.linux import state_of
from allranks.launcher.processes.process import ProcessState
from allranks.launcher.supervisor import Hang, find_hang, ranks_waited_for

TIMEOUT_S = 10.0


def beat(
    rank: int, phase: str = "exchange", *, step: int = 5, collectives: int = 50, ago: float = 60.0
) -> Beat:
    """The last beat of a rank, `ago` seconds old."""
    return Beat(rank, 9, step, phase, time.monotonic() - ago, collectives, {})


@pytest.fixture
def sleepers() -> Iterator[dict[int, int]]:
    """Processes that stand for ranks 0, 1 and 2: they write no stack, and die of the signal."""
    found = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield {rank: process.pid for rank, process in enumerate(found)}
    for process in found:
        process.kill()
        process.wait()


@pytest.fixture
def files() -> Iterator[dict[int, int]]:
    made = {rank: os.memfd_create(f"stacks-{rank}") for rank in range(3)}
    yield made
    for fd in made.values():
        os.close(fd)


def hang_of(
    beats: list[Beat], pids: dict[int, int], files: dict[int, int], awake_since: float = 0.0
) -> Hang | None:
    def stands() -> dict[int, ProcessState]:
        states = {rank: state_of(pid) for rank, pid in pids.items()}
        return {
            rank: ProcessState(states[rank], text) for rank, text in stacks_of(pids, files).items()
        }

    return find_hang(beats, pids, TIMEOUT_S, awake_since, stands)


# --- is it a hang -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "places",
    [
        [("exchange", 1), ("exchange", 1), ("exchange", 1)],
        [("exchange", 60), ("exchange", 60), ("compute", 1)],
        [("exchange", 60), ("exchange", 9), ("exchange", 60)],
        [("data", 1), ("save", 1), ("evaluate", 1)],
    ],
    ids=["all beat", "one works", "one came late", "all work"],
)
def test_while_there_is_life_nobody_is_named(
    places: list[tuple[str, float]], sleepers: dict[int, int], files: dict[int, int]
) -> None:
    beats = [beat(rank, phase, ago=ago) for rank, (phase, ago) in enumerate(places)]
    assert hang_of(beats, sleepers, files) is None
    assert all(Path(f"/proc/{pid}").exists() for pid in sleepers.values()), "nobody was disturbed"


def test_one_that_stands_still_and_waits_for_nobody_is_enough(
    sleepers: dict[int, int], files: dict[int, int]
) -> None:
    """Others may beat all the while: ranks that train apart, or a phase that is cut short."""
    found = hang_of([beat(0, ago=1), beat(1, "data"), beat(2, ago=1)], sleepers, files)
    assert found is not None and found.missing == (1,)


@pytest.mark.slow
def test_in_a_save_the_one_whose_thread_waits_for_nobody_is_named(
    sleepers: dict[int, int], files: dict[int, int]
) -> None:
    waits = [dataclasses.replace(beat(rank, "save"), save_waits=True) for rank in range(3)]
    found = hang_of([waits[0], beat(1, "save"), waits[2]], sleepers, files)
    assert found is not None and found.missing == (1,)
    found = hang_of([waits[0], beat(1, "compute", ago=1), waits[2]], sleepers, files)
    assert found is None, "it has not come to the save yet"


def test_time_in_which_nobody_could_beat_does_not_count(
    sleepers: dict[int, int], files: dict[int, int]
) -> None:
    beats = [beat(rank, "compute") for rank in range(3)]
    assert hang_of(beats, sleepers, files, time.monotonic() - TIMEOUT_S + 1) is None


@pytest.mark.slow
def test_a_rank_that_never_came_up_is_found(
    sleepers: dict[int, int], files: dict[int, int]
) -> None:
    beats = [beat(0), beat(1), Beat(2, 0, 0, "start", 0.0, 0, {})]
    found = hang_of(beats, sleepers, files, time.monotonic() - TIMEOUT_S - 1)
    assert found is not None and found.missing == (2,)


def test_ranks_that_are_gone_are_not_looked_at(
    sleepers: dict[int, int], files: dict[int, int]
) -> None:
    living = {rank: pid for rank, pid in sleepers.items() if rank != 1}
    found = hang_of([beat(0), beat(1, "compute"), beat(2, "compute")], living, files)
    assert found is not None and found.missing == (2,) and set(found.beats) == {0, 2}
    assert hang_of([beat(0), beat(1), beat(2)], {}, files) is None


@pytest.mark.slow
def test_where_each_stood_is_told_even_where_no_stack_could_be_had(
    sleepers: dict[int, int], files: dict[int, int], tmp_path: Path
) -> None:
    os.kill(sleepers[1], signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while state_of(sleepers[1]) != "T":
        assert time.monotonic() < deadline
    os.write(files[0], b"Thread 1:\n  in wait\n")
    beats = [beat(0), beat(1, "compute", collectives=49), beat(2)]
    found = hang_of(beats, sleepers, files)
    assert found is not None and found.missing == (1,) and found.states[1] == "T"
    (tmp_path / "logs").mkdir()
    text = hang_report(found, tmp_path, 3)
    assert text.splitlines()[0] == "no sign of life for 10 s (--hang-timeout)"
    told = r"is missing: in `compute` of step 5 for 6\d\.\d s, after 49 collectives; stopped"
    assert re.search(told, text), text
    assert "rank 0 waits in `exchange` of step 5" in text and "it wrote no stack" in text
    whole = (tmp_path / "logs" / "hang-3.txt").read_text()
    assert whole.startswith("rank 1 (missing): ") and "in wait" in whole


# --- who is missing ---------------------------------------------------------------------------

PLACES = st.tuples(st.sampled_from(PHASES), st.integers(0, 9), st.integers(0, 30))


@given(st.lists(PLACES, min_size=2, max_size=8))
def test_a_rank_that_waits_is_never_named_while_another_does_not(
    places: list[tuple[str, int, int]],
) -> None:
    beats = {r: beat(r, p, step=s, collectives=c) for r, (p, s, c) in enumerate(places)}
    at_fault = {rank for rank, b in beats.items() if b.phase != "exchange"}
    found = ranks_waited_for(beats, at_fault)
    if at_fault:
        assert set(found) == at_fault
    assert list(found) == sorted(found)
    assert len(found) < len(beats) or at_fault == set(beats)


@given(st.integers(2, 8), st.data())
def test_if_all_wait_the_one_that_is_short_of_a_collective_is_named(
    ranks: int, data: st.DataObject
) -> None:
    one = data.draw(st.integers(0, ranks - 1))
    short = data.draw(st.integers(1, 20))
    beats = {r: beat(r, collectives=50 - short * (r == one)) for r in range(ranks)}
    assert ranks_waited_for(beats, set()) == (one,)


@given(st.integers(2, 8), st.data())
def test_at_equal_counts_it_is_the_one_that_is_ahead(ranks: int, data: st.DataObject) -> None:
    """It left one out, and waits in the next with the count that the others have in the last."""
    one = data.draw(st.integers(0, ranks - 1))
    beats = {r: beat(r, step=6 if r == one else 5) for r in range(ranks)}
    assert ranks_waited_for(beats, set()) == (one,)


@given(st.integers(2, 8), st.integers(0, 5), st.integers(0, 50))
def test_if_all_stand_alike_nobody_is_accused(ranks: int, step: int, count: int) -> None:
    beats = {r: beat(r, step=step, collectives=count) for r in range(ranks)}
    assert ranks_waited_for(beats, set()) == ()


def test_who_is_in_a_call_of_the_user_s_is_named_and_not_who_waits_in_the_step() -> None:
    """The leader alone saves: the others have as many collectives, and are a step ahead."""
    package = str(Path(find_hang.__code__.co_filename).parents[1])
    frames = [f"{package}/torch/comm/comm.py", f"{package}/torch/trainer.py", f"{package}/fit.py"]
    engine = "".join(f'  File "{file}", line 1 in one\n' for file in frames)
    user = engine.replace(
        f'  File "{frames[2]}"',
        f'  File "/home/me/task.py", line 28 in on_step\n  File "{frames[2]}"',
    )
    stands = {
        0: ProcessState("S", user),
        1: ProcessState("S", engine),
        2: ProcessState("S", engine),
    }
    beats = [beat(0, step=3), beat(1, step=4), beat(2, step=4)]
    found = find_hang(beats, range(3), TIMEOUT_S, 0.0, lambda: stands)
    assert found is not None and found.missing == (0,)
    assert found.describe(0).endswith("; called by /home/me/task.py line 28 in on_step")
