"""The run folder: one owner while it lives, nothing left where nothing ran, readable meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.checkpoint.files import as_json, write_whole
from allranks.cli.display.progress import lost_in
from allranks.errors import PlaceError, RequestError
from allranks.job import run_folder
from allranks.job.job import read_job_file
from allranks.job.run_folder import (
    JsonLines,
    RunFolder,
    is_in_use,
    rank_events_path,
    rank_log_path,
    read_events,
    read_rows,
)
from conftest import Train

HOLDER = """
import sys, time
from pathlib import Path
from allranks.job.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- the lock -------------------------------------------------------------------------------


def test_a_folder_belongs_to_a_living_process_and_to_nobody_after_its_death(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_in_use(path)
        before = everything_below(path)
        with pytest.raises(RequestError, match="in use by a running job") as refused:
            RunFolder(path)
        assert refused.value.do.endswith("or wait for that job")
        assert everything_below(path) == before, "another's folder is left alone"
    finally:
        holder.kill()
        holder.communicate()
    assert not is_in_use(path)
    with pytest.raises(RequestError, match="something is there already"):
        RunFolder(path)


def test_a_folder_is_free_once_it_is_closed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert is_in_use(folder.path)
    folder.close()
    assert not is_in_use(folder.path)
    kept = {"logs", "events.jsonl", ".lock"}  # unlinked, the lock would be another's to make anew
    assert everything_below(folder.path) == kept
    folder.close()


def test_somebody_who_may_only_read_sees_that_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = RunFolder(tmp_path / "run"), os.open

    def for_reading_only(path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(path)
        return opened(path, flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", for_reading_only)
        assert is_in_use(folder.path)
    folder.close()


def test_what_is_no_run_folder_is_not_in_use(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path) and not is_in_use(tmp_path / "nowhere")


# --- made and removed -----------------------------------------------------------------------


def test_removing_leaves_no_parent_that_was_made_for_it(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a" / "b" / "run").remove()
    assert everything_below(tmp_path) == set()


def test_removing_leaves_a_parent_that_holds_something_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b" / "run")
    (tmp_path / "a" / "other").touch()
    folder.remove()
    assert everything_below(tmp_path) == {"a", "a/other"}


def test_removing_leaves_a_parent_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    RunFolder(tmp_path / "a" / "run").remove()
    assert everything_below(tmp_path) == {"a"}


def test_an_empty_folder_may_become_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.close()
    assert (tmp_path / "run" / "logs").is_dir()


@pytest.mark.parametrize("name", ["file", "file/run", "full", "n" * 300])
def test_a_place_where_no_folder_can_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    before = everything_below(tmp_path)
    with pytest.raises(RequestError) as refused:
        RunFolder(tmp_path / name)
    assert refused.value.asked == f"--run-dir {tmp_path / name}"
    assert everything_below(tmp_path) == before


# --- what is in it --------------------------------------------------------------------------


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "job.toml", b"old")
    write_whole(tmp_path / "job.toml", b"new")
    assert (tmp_path / "job.toml").read_bytes() == b"new"
    assert everything_below(tmp_path) == {"job.toml"}


def test_an_event_can_be_read_at_once_and_a_row_after_closing(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with JsonLines(path) as lines:
        lines.event("started", ranks=2)
        (event,) = read_rows(path)
        lines.row({"step": 0, "text": "line\nbreak \u2028 ü"})
    assert event["event"] == "started" and event["ranks"] == 2
    assert event["time"] > 1e9 and event["monotonic"] > 0
    assert list(read_rows(path))[1] == {"step": 0, "text": "line\nbreak \u2028 ü"}
    assert path.read_bytes().count(b"\n") == 2


def test_the_rows_of_a_writer_that_was_killed_are_read_but_for_the_torn_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"step": 2, "text": "\xc3')
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    assert list(read_rows(tmp_path / "nowhere.jsonl")) == []


def test_numbers_that_are_not_finite_become_their_names() -> None:
    value = {"a": float("nan"), "b": [float("inf"), -float("inf"), 1.5], "c": (1, {"d": 2.0})}
    line = as_json(value)
    assert json.loads(line) == {"a": "nan", "b": ["inf", "-inf", 1.5], "c": [1, {"d": 2.0}]}
    assert [float(json.loads(line)["b"][i]) for i in range(2)] == [float("inf"), -float("inf")]


def test_events_of_all_writers_are_read_in_order_of_time(tmp_path: Path) -> None:
    for path, events in (
        (tmp_path / "events.jsonl", [("started", 1.0), ("done", 9.0)]),
        (rank_events_path(tmp_path, 0), [("ready", 3.0)]),
        (rank_events_path(tmp_path, 11), [("ready", 2.0), ("failed", 4.0)]),
    ):
        with JsonLines(path) as lines:
            for name, time in events:
                lines.row({"event": name, "time": time})
    found = [(event["rank"], event["event"]) for event in read_events(tmp_path)]
    assert found == [
        (None, "started"),
        (11, "ready"),
        (0, "ready"),
        (11, "failed"),
        (None, "done"),
    ]


def test_logs_sort_by_rank() -> None:
    assert [rank_log_path(Path("run"), rank) for rank in (0, 12)] == [
        Path("run/logs/rank-000.log"),
        Path("run/logs/rank-012.log"),
    ]
    assert os.fspath(rank_events_path(Path("run"), 3)) == "run/events-3.jsonl"


# --- files that go while they are written -----------------------------------------------------


def test_a_file_that_somebody_removes_is_begun_again(tmp_path: Path) -> None:
    """An open file that no folder names takes every line, and gives none back."""
    path = tmp_path / "events-0.jsonl"
    with JsonLines(path) as events:
        events.event("ready")
        path.unlink()
        assert events.is_unlinked and not events.was_removed
        events.event("done")
        assert events.was_removed and not events.is_unlinked
        assert [row["event"] for row in read_rows(path)] == ["done"]


def test_a_run_folder_that_somebody_removes_ends_the_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.look()
    shutil.rmtree(folder.path)
    with pytest.raises(PlaceError, match="was removed while the job ran"):
        folder.look()
    folder.events.event("failed")  # whoever reports it finds no further trouble
    folder.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "name", ["", "metrics.jsonl", "events-0.jsonl", "events.jsonl", "job.toml"]
)
def test_what_goes_while_a_job_trains_is_said(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A log that is gone ends no training; a run folder that is gone does, at once."""
    monkeypatch.setattr(run_folder, "LOOK_EVERY_S", 0.0)
    run = tmp_path / "run"
    more = {"run_dir": str(run), "ranks": 2, "steps": 40, "hang_timeout": 60.0}
    if not name:
        with pytest.raises(PlaceError, match="was removed while the job ran"):
            train("resume_tasks:Removing", f"removes={run}", **more)
        return
    summary = train("resume_tasks:Removing", f"removes={run / name}", **more).summary
    told = [row["event"] for row in read_events(run)]
    assert (run / name).exists()
    if name == "job.toml":
        assert "job_file_restored" in told
        assert read_job_file(str(run / name))[0]["program"] == "resume_tasks:Removing"
    else:
        assert name in summary["not_kept"] and "not_kept" in told
        assert lost_in(summary).endswith(f"{name} was removed while it ran")
