"""Which checkpoints an evaluator judges while others train: the newest, each once, and the last.

Checkpoints that came and went meanwhile are passed over. An evaluator reads the checkpoints of the
run folder and changes none; one that is started again goes on after what it has said already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from allranks.checkpoint.folder import committed, step_of, verify_files
from allranks.checkpoint.manifest import BadCheckpoint, Manifest, read_manifest
from allranks.job.resume import CHECKPOINTS
from allranks.job.run_folder import rank_events_path, read_rows
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.strategies.roles import LEADER

LOOK_S = 0.1
ENDED = ("done", "stopped")

T = TypeVar("T")


def checkpoints_to_evaluate(
    run_dir: Path, world: World, heartbeat: Heartbeat, read: Callable[[Path, Manifest], T]
) -> Iterator[tuple[int, T]]:
    """Each newest checkpoint: its step, and what `read` makes of it; until the leader has ended.

    That of the end is among them, although the leader is done by then.
    """
    done = _evaluated_before(run_dir, world.rank)
    while True:
        is_last = heartbeat.wants_stop or _has_ended(run_dir, world.attempt)  # before it looks
        heartbeat.enter("exchange")
        for step, found in _newest(run_dir / CHECKPOINTS, done, read):
            done.add(step)
            heartbeat.at_step(step)
            heartbeat.enter("evaluate")
            yield step, found
        if is_last:
            return
        time.sleep(LOOK_S)


def _newest(
    checkpoints: Path, done: set[int], read: Callable[[Path, Manifest], T]
) -> list[tuple[int, T]]:
    """The newest checkpoint, if it is whole and was not evaluated yet."""
    for folder in committed(checkpoints)[:1]:
        if step_of(folder) in done:
            return []
        try:
            manifest = read_manifest(folder)
            if not verify_files(folder, manifest, manifest.files):
                return [(manifest.step, read(folder, manifest))]
        except (
            BadCheckpoint,
            FileNotFoundError,
        ):  # it went while it was read: there is a newer one
            return []
    return []


def _evaluated_before(run_dir: Path, rank: int) -> set[int]:
    rows = read_rows(rank_events_path(run_dir, rank))
    return {int(row["step"]) for row in rows if row["event"] == "evaluated"}


def _has_ended(run_dir: Path, attempt: int) -> bool:
    rows = read_rows(rank_events_path(run_dir, LEADER))
    return any(row["event"] in ENDED and row.get("attempt", 0) == attempt for row in rows)
