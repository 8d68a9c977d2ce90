"""Which checkpoints an evaluator judges: each newest one once, by what is in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from allranks.checkpoint.folder import set_aside
from allranks.checkpoint.format import (
    Manifest,
    SavedFile,
    digest,
    rank_file,
    step_folder,
    write_manifest,
)
from allranks.job.run_folder import JsonLines, rank_events_path, read_rows
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.training import work_queue as evaluating
from allranks.training.work_queue import checkpoints_to_evaluate

RANK = 5


class Looking:
    """The heartbeat of an evaluator that is told to end after so many looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    @property
    def wants_stop(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def enter(self, phase: str) -> None: ...

    def at_step(self, step: int) -> None: ...


def commit(run_dir: Path, step: int, weights: bytes, attempt: int = 0) -> Path:
    folder = step_folder(run_dir / "checkpoints", step)
    folder.mkdir(parents=True, exist_ok=True)
    name = rank_file(0, 1, attempt)
    (folder / name).write_bytes(weights)
    files = {name: SavedFile(len(weights), digest(weights))}
    write_manifest(folder, Manifest(step, time.time(), 1, files, {}))
    return folder


def judged(run_dir: Path, read: Any = None, looks: int = 4) -> list[tuple[int, bytes]]:
    """What an evaluator that is started now judges, and writes down."""

    def contents(folder: Path, manifest: Manifest) -> bytes:
        return (folder / next(iter(manifest.files))).read_bytes()

    path = rank_events_path(run_dir, RANK)
    path.parent.mkdir(parents=True, exist_ok=True)
    events, found = JsonLines(path), []
    looking, world = cast(Heartbeat, Looking(looks)), World(rank=RANK, size=6)
    given = checkpoints_to_evaluate(run_dir, world, looking, read or contents, events)
    for (step, of), weights in given:
        events.event("evaluated", step=step, digest=of, metrics={})
        found.append((step, weights))
    events.close()
    return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "LOOK_S", 0.0)


def said(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_rows(rank_events_path(run_dir, RANK))
    return [row for row in rows if row["event"] == "checkpoint_skipped"]


def test_a_step_with_other_weights_is_judged_again(tmp_path: Path) -> None:
    """After a rewind; the same weights, saved again, are not, in this process or another."""
    commit(tmp_path, 4, b"first")
    assert judged(tmp_path) == [(4, b"first")] and judged(tmp_path) == []
    commit(tmp_path, 4, b"first", attempt=1)
    assert judged(tmp_path) == []
    commit(tmp_path, 4, b"other", attempt=1)
    assert judged(tmp_path) == [(4, b"other")] and judged(tmp_path) == []


def test_a_damaged_checkpoint_is_said_once_and_kills_nobody(tmp_path: Path) -> None:
    folder = commit(tmp_path, 4, b"first")
    (folder / rank_file(0, 1, 0)).write_bytes(b"fIrst")
    assert judged(tmp_path, looks=9) == []
    (skipped,) = said(tmp_path)
    assert skipped["step"] == 4 and "its digest" in skipped["problems"][0]
    commit(tmp_path, 4, b"again", attempt=1)
    assert judged(tmp_path) == [(4, b"again")], "it was saved anew"


def test_one_that_cannot_be_read_is_said_and_one_that_went_is_not(tmp_path: Path) -> None:
    def fails(folder: Path, manifest: Manifest) -> bytes:
        raise OSError(5, "Input/output error")

    def goes(folder: Path, manifest: Manifest) -> bytes:
        set_aside(folder)
        raise FileNotFoundError(folder)

    commit(tmp_path, 4, b"first")
    assert judged(tmp_path, goes) == [] and said(tmp_path) == []
    commit(tmp_path, 8, b"first")
    assert judged(tmp_path, fails, looks=9) == [] and len(said(tmp_path)) == 1
