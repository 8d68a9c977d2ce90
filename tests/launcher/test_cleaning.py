"""`--clean`: what dead runs left is removed, said by name of run, and nothing of the living."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from allranks.launcher.processes import leftovers
from allranks.launcher.processes.leftovers import SCRATCH, owner
from allranks.tools.doctor import cleaning
from allranks.tools.doctor.cleaning import Leftover, clean, find_leftovers

Start = Callable[..., subprocess.Popen[bytes]]
VARIABLE = "ALLRANKS_OWNER_OF_TEST"
OWNER_OF_ITS_OWN = "from allranks.launcher.processes.leftovers import owner; print(owner())"


@pytest.fixture(autouse=True)
def unseen_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of our own: each start sweeps, and that of another test would be the first to end."""
    monkeypatch.setattr(leftovers, "VARIABLE", VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def a_dead_owner() -> str:
    done = subprocess.run(
        [sys.executable, "-c", OWNER_OF_ITS_OWN], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(mark, run)`: a process with this mark that writes to the log of a rank of this run."""
    started = []

    def run(mark: str, name: str = "") -> subprocess.Popen[bytes]:
        log = tmp_path / name / "logs" / "rank-000.log" if name else Path(os.devnull)
        if name:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["sleep", "600"],
                env={"PATH": os.environ["PATH"], VARIABLE: mark},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(process)
        deadline = time.monotonic() + 60
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def of(owners: Collection[str], found: Sequence[Leftover]) -> list[Leftover]:
    """Those of these owners: other tests on this machine may have some of their own."""
    return [one for one in found if one.owner in owners]


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def test_all_that_is_left_is_removed_and_named_by_its_run(start: Start, tmp_path: Path) -> None:
    dead = a_dead_owner()
    rank, helper = start(f"{dead}/1", "runs/first"), start(f"{dead}/agents")
    alive, foreign = start(f"{owner()}/1", "runs/first"), start("someone else")
    scratch = tmp_path / f"{SCRATCH}{dead}-abc"
    (scratch / "logs").mkdir(parents=True)
    cleaned = clean()
    assert of([dead], cleaned.still_there) == of([dead], find_leftovers()) == []
    removed = of([dead], cleaned.removed)
    told = {one.pid or one.name: one.run for one in removed}
    run = str(tmp_path / "runs/first")
    assert told == {rank.pid: run, helper.pid: None, str(scratch): None}
    assert {one.name for one in removed if one.pid} == {"sleep 600"}
    assert has_ended(rank) and has_ended(helper) and not scratch.exists()
    assert not has_ended(alive) and not has_ended(foreign)


def test_of_one_run_only_what_its_owner_left_is_removed(start: Start, tmp_path: Path) -> None:
    one, other = a_dead_owner(), a_dead_owner()
    mine, helper = start(f"{one}/1", "runs/first"), start(f"{one}/agents")
    another = start(f"{one}/2", "runs/second")
    beside, alive = start(f"{other}/1", "runs/third"), start(f"{owner()}/1", "runs/first")
    for name in (one, other):
        (tmp_path / f"{SCRATCH}{name}-abc").mkdir()
    cleaned = clean(tmp_path / "runs/first")
    gone = {mine.pid, helper.pid, str(tmp_path / f"{SCRATCH}{one}-abc")}
    assert {found.pid or found.name for found in cleaned.removed} == gone
    assert has_ended(mine) and has_ended(helper)
    assert not any(map(has_ended, (another, beside, alive)))
    assert (tmp_path / f"{SCRATCH}{other}-abc").is_dir()


def test_of_one_server_that_had_two_runs_only_the_one_is_ended(
    start: Start, tmp_path: Path
) -> None:
    dead = a_dead_owner()
    mine, other = start(f"{dead}/1", "runs/first"), start(f"{dead}/1", "runs/second")
    cleaned = clean(tmp_path / "runs/first")
    assert [found.pid for found in cleaned.removed] == [mine.pid]
    mine.wait(60)
    assert not has_ended(other)


def test_the_run_is_known_when_its_folder_is_gone(start: Start, tmp_path: Path) -> None:
    dead = a_dead_owner()
    process = start(f"{dead}/1", "runs/first")
    (tmp_path / "runs/first/logs/rank-000.log").unlink()
    (found,) = of([dead], clean().removed)
    assert found.pid == process.pid and found.run == str(tmp_path / "runs/first")


def test_scratch_folders_beside_the_runs_are_found(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    dead = a_dead_owner()
    scratch = runs / f"{SCRATCH}{dead}-abc"
    scratch.mkdir(parents=True)
    (runs / f"{SCRATCH}{owner()}-abc").mkdir()
    assert of([dead], clean().removed) == []
    assert [found.name for found in of([dead], clean(within=runs).removed)] == [str(scratch)]
    assert os.listdir(runs) == [f"{SCRATCH}{owner()}-abc"]


def test_what_cannot_be_removed_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = a_dead_owner()
    process = start(f"{dead}/1")
    monkeypatch.setattr(cleaning, "PATIENCE_S", 0.0)
    monkeypatch.setattr(cleaning, "end_processes_of", lambda mark: None)
    cleaned = clean()
    assert of([dead], cleaned.removed) == []
    assert [found.pid for found in of([dead], cleaned.still_there)] == [process.pid]
