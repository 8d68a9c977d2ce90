"""Which checkpoints an evaluator judges while others train: the newest, each once, and the last.

Checkpoints that came and went meanwhile are passed over, and one that is damaged, which is said. An
evaluator reads the checkpoints of the run folder and changes none; one that is started again goes
on after what it has said already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from allranks.checkpoint.folder import committed, step_of, verify_files
from allranks.checkpoint.manifest import NAME, BadCheckpoint, Manifest, digest, read_manifest
from allranks.checkpoint.newest import read_as
from allranks.job.resume import CHECKPOINTS
from allranks.job.run_folder import JsonLines, rank_events_path, read_rows
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.strategies.roles import LEADER

LOOK_S = 0.1
ENDED = ("done", "stopped")

T = TypeVar("T")


class Judged(NamedTuple):
    """What was evaluated: after a rewind the same step may have other weights."""

    step: int
    digest: str


def checkpoints_to_evaluate(
    run_dir: Path,
    world: World,
    heartbeat: Heartbeat,
    read: Callable[[Path, Manifest], T],
    events: JsonLines,
) -> Iterator[tuple[Judged, T]]:
    """Each newest checkpoint: which it is, and what `read` makes of it; until the leader has ended.

    That of the end is among them, although the leader is done by then. The event of an evaluation
    has the step and the digest; of one that is damaged there is the event `checkpoint_skipped`.
    """
    looks = Looks(run_dir / CHECKPOINTS, _evaluated_before(run_dir, world.rank), events)
    while True:
        is_last = heartbeat.wants_stop or _has_ended(run_dir, world.attempt)  # before it looks
        heartbeat.enter("exchange")
        for judged, found in looks.newest(read):
            heartbeat.at_step(judged.step)
            heartbeat.enter("evaluate")
            yield judged, found
        if is_last:
            return
        time.sleep(LOOK_S)


class Looks:
    """Looks at the newest checkpoint in `checkpoints`, and reads each once; `done` were judged."""

    def __init__(self, checkpoints: Path, done: set[Judged], events: JsonLines) -> None:
        self._checkpoints, self._done, self._events = checkpoints, done, events
        self._known = set[object]()

    def newest(self, read: Callable[[Path, Manifest], T]) -> list[tuple[Judged, T]]:
        """The newest checkpoint, if it is whole and was not evaluated yet."""
        folder = self._newest_folder()
        known = None if folder is None else _version_of(folder)
        if folder is None or known is None or known in self._known:
            return []
        try:
            found = self._read(folder, read)
        except (BadCheckpoint, OSError) as error:
            if _version_of(folder) != known:  # it went meanwhile, or another one is in its place
                return []
            found, told = [], {"step": step_of(folder), "path": str(folder), "set_aside": None}
            self._events.event("checkpoint_skipped", problems=[str(error)], **told)
        self._known.add(known)
        return found

    def _newest_folder(self) -> Path | None:
        with suppress(OSError):
            return next(iter(committed(self._checkpoints)), None)
        return None

    def _read(self, folder: Path, read: Callable[[Path, Manifest], T]) -> list[tuple[Judged, T]]:
        manifest = read_manifest(folder)
        judged = Judged(manifest.step, _digest_of(manifest))
        if judged in self._done:
            return []
        problems = verify_files(folder, manifest, manifest.files)
        if problems:
            raise BadCheckpoint("; ".join(problems))
        found: T = read_as(read, folder, manifest)
        self._done.add(judged)
        return [(judged, found)]


def _version_of(folder: Path) -> object:
    """What is another one as soon as another manifest lies there; `None` where there is none."""
    try:
        found = (folder / NAME).stat()
    except OSError:
        return None
    return folder.name, found.st_ino, found.st_mtime_ns


def _digest_of(manifest: Manifest) -> str:
    """That of all its files: the same weights, saved again, are the same."""
    digests = sorted(file.blake2b for file in manifest.files.values())
    return digest("".join(digests).encode())


def _evaluated_before(run_dir: Path, rank: int) -> set[Judged]:
    rows = read_rows(rank_events_path(run_dir, rank))
    evaluated = (row for row in rows if row["event"] == "evaluated")
    return {Judged(int(row["step"]), str(row.get("digest"))) for row in evaluated}


def _has_ended(run_dir: Path, attempt: int) -> bool:
    rows = read_rows(rank_events_path(run_dir, LEADER))
    return any(row["event"] in ENDED and row.get("attempt", 0) == attempt for row in rows)
