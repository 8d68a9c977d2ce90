"""Jobs packed on one machine, and the folder with their state.

A job gets what it would get alone: its words, a run folder, a number of threads that was decided
beforehand. These stand in `sweep.json`, which is written once; what became of each job its own run
folder says, and from there a sweep goes on. `slots` runs them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from allranks.checkpoint.files import as_json, write_whole
from allranks.errors import RequestError
from allranks.job.run_folder import rank_events_path, read_rows

RECORD = "sweep.json"
SCHEMA = 2
LOGS = "logs"
DONE, FAILED, STOPPED, INTERRUPTED = "done", "failed", "stopped", "interrupted"
WAITING, RUNNING = "waiting", "running"


@dataclass(frozen=True)
class PackedJob:
    """One job: the name of its run folder, its own settings, and the words after `train`."""

    name: str
    settings: dict[str, str]
    words: tuple[str, ...]
    threads: int


@dataclass(frozen=True)
class Slot:
    """Room for one job at a time: its cores (none: all), and words for whatever job is in it."""

    number: int
    cores: tuple[int, ...] = ()
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        cores = f" (cores {', '.join(map(str, self.cores))})" if self.cores else ""
        return f"slot {self.number}{cores}"


@dataclass(frozen=True)
class Packing:
    """All jobs, in the order in which they are started, and where."""

    folder: Path
    jobs: tuple[PackedJob, ...]
    slots: tuple[Slot, ...]

    @property
    def key(self) -> str:
        """What makes it the same sweep again: its jobs, not how many at once."""
        said = [[job.name, list(job.words)] for job in self.jobs]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


@dataclass(frozen=True)
class Previous:
    """What `sweep.json` holds: the key of a packing, and the threads of each job by its name."""

    key: str
    threads: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """What became of a job; `report` says why it failed. Times are those of the wall clock."""

    name: str
    settings: dict[str, str]
    threads: int
    run_dir: str
    state: str = WAITING
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    summary: dict[str, Any] | None = None
    report: str | None = None


def share_out(cores: Sequence[int], slots: int) -> list[tuple[int, ...]]:
    """The cores of each slot: as many for all as can be, none shared; () where they are too few."""
    if len(cores) < slots:
        return [()] * slots
    each, more = divmod(len(cores), slots)
    starts = [slot * each + min(slot, more) for slot in range(slots + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def previous(folder: Path) -> Previous | None:
    """The sweep that began in this folder, if any; raises `RequestError` if unreadable."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']}")
        return Previous(record["key"], {n: int(count) for n, count in record["threads"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            asked=f"to resume the sweep {folder}",
            found=f"{type(error).__name__}: {error} in {RECORD}",
            why=f"this version reads schema {SCHEMA}, as a sweep writes it",
            do="start the sweep in another folder",
        ) from None


def last_event(run_dir: Path) -> dict[str, Any]:
    """What the supervisor of a run wrote last; an event without a name if there is none."""
    return next(iter([*read_rows(run_dir / "events.jsonl")][-1:]), {"event": ""})


def result_of(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that is done; `None` if it is not."""
    last = last_event(run_dir)
    if last["event"] != "done":
        return None
    for row in read_rows(rank_events_path(run_dir, 0)):
        if row["event"] == "done" and row["attempt"] == last["attempt"]:
            return {"run_dir": str(run_dir), **row["summary"]}
    return None


class Sweep:
    """The folder of a packing, held by this process, and what has become of its jobs so far."""

    def __init__(self, packing: Packing) -> None:
        """Make the folder, or go on in one; raises `RequestError` if that cannot be."""
        self.packing, folder = packing, packing.folder
        before = previous(folder)
        if before is None and folder.exists() and any(folder.iterdir()):
            raise _not_ours(folder, "something is there already, and no sweep left it")
        if before is not None and before.key != packing.key:
            raise _not_ours(folder, "a sweep of other jobs")
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_ours(folder, str(error)) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise _not_ours(folder, "a sweep that is running") from None
        if before is None:
            threads = {job.name: job.threads for job in packing.jobs}
            record = as_json({"schema": SCHEMA, "key": packing.key, "threads": threads})
            write_whole(folder / RECORD, f"{record}\n".encode())
        self.outcomes = {job.name: self._found(job) for job in packing.jobs}

    def _found(self, job: PackedJob) -> Outcome:
        """What is there of a job already."""
        run_dir = self.packing.folder / job.name
        summary = result_of(run_dir)
        state = WAITING if summary is None else DONE
        return Outcome(job.name, job.settings, job.threads, str(run_dir), state, summary=summary)

    def note(self, job: PackedJob, **values: Any) -> Outcome:
        """Change what is known of a job."""
        self.outcomes[job.name] = dataclasses.replace(self.outcomes[job.name], **values)
        return self.outcomes[job.name]

    def to_data(self) -> dict[str, Any]:
        """What became of all jobs, for `--json`."""
        return {
            "sweep_dir": str(self.packing.folder),
            "slots": len(self.packing.slots),
            "jobs": [dataclasses.asdict(outcome) for outcome in self.outcomes.values()],
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def _not_ours(folder: Path, found: str) -> RequestError:
    return RequestError(
        asked=f"--run-dir {folder}",
        found=found,
        why="a sweep writes the run folders of its jobs there, and goes on only with its own",
        do="name a folder that does not exist yet, or say the same words as before",
    )
