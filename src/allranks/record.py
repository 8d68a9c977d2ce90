"""The run folder: everything that a job leaves behind, one writer per file, readable meanwhile.

    job.toml            the job, with the source of every value          (supervisor)
    events.jsonl        what the supervisor saw                          (supervisor)
    events-R.jsonl      what rank R has to say                           (rank R)
    metrics.jsonl       loss, rate, samples of each step                 (leader)
    logs/rank-RRR.log   what rank R printed, raw                         (rank R)
    weights.safetensors the weights at the end                           (leader)
    trace/              with `check` only: every step in full            (each rank its own files)

A run folder in use holds a lock that the kernel drops when its supervisor dies, however it dies.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from allranks.config import SCHEMA, Resolved, write_toml
from allranks.errors import RequestError

FLUSH_EVERY_S = 0.25


class RunFolder:
    """A run folder that this process owns: created, locked, and removed again if nothing ran."""

    def __init__(self, path: Path) -> None:
        """Create `path` and lock it; raises `RequestError` if it is in use, or not empty."""
        self.path = path
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise _taken(path)
            self._made = [p for p in (path, *path.parents) if not p.exists()]
            (path / "logs").mkdir(parents=True)
        except FileExistsError:
            raise _taken(path) from None
        except OSError as error:
            raise RequestError(
                asked=f"--run-dir {path}",
                found=str(error),
                why="a job writes its log, its metrics and its weights there",
                do="name a folder that can be written",
            ) from None
        self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.events = JsonLines(path / "events.jsonl")

    def write_job(self, resolved: Resolved) -> None:
        """Write `job.toml` whole: under another name first, then renamed."""
        values = resolved.job.to_data()
        for name in ("trace", "replay"):
            values.pop(name)
        task = {name: "none" if v is None else v for name, v in values["task"].items()}
        values = {"schema": SCHEMA, **values, "task": task, "source": resolved.sources}
        write_whole(self.path / "job.toml", write_toml(values).encode())

    def remove(self) -> None:
        """Leave no trace: nothing was trained. Folders that were made for it go, no others."""
        self.close()
        for inside in self.path.iterdir():
            shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
        for parent in self._made:
            if any(parent.iterdir()):
                break
            parent.rmdir()

    def close(self) -> None:
        """Release the lock; the folder stays."""
        self.events.close()
        if self._lock >= 0:
            (self.path / ".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def _taken(path: Path) -> RequestError:
    in_use = is_in_use(path)
    return RequestError(
        asked=f"--run-dir {path}",
        found="a run folder in use by a running job" if in_use else "something is there already",
        why="a job never writes over what another one left",
        do="name a folder that does not exist yet" + (", or wait for that job" if in_use else ""),
    )


def is_in_use(path: Path) -> bool:
    """Whether a living supervisor holds this run folder."""
    try:
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all: a name beside it, fsync, rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


class JsonLines:
    """A file of JSON lines with one writer. Lines are kept for a moment, so that a step is cheap."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = open(path, "a", encoding="utf-8")
        self._lines: list[str] = []
        self._flushed = time.monotonic()

    def event(self, name: str, **values: Any) -> None:
        """Write one event at once, with the wall clock and this host's monotonic clock."""
        now = {"event": name, "time": time.time(), "monotonic": time.monotonic()}
        self._lines.append(as_json({**now, **values}))
        self.flush()

    def row(self, values: dict[str, Any]) -> None:
        """Add one row; it reaches the file within `FLUSH_EVERY_S` of the next row, or at close."""
        self._lines.append(as_json(values))
        if time.monotonic() - self._flushed > FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._lines and not self._file.closed:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
        self._lines.clear()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


_encode = json.JSONEncoder(allow_nan=False).encode


def as_json(value: Any) -> str:
    """One line of JSON; a number that is not finite becomes the text `nan`, `inf` or `-inf`."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file that are whole; a missing file has none."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of the supervisor and of all ranks, each with its `rank`, in order of time."""
    events = [{"rank": None, **row} for row in read_rows(run_dir / "events.jsonl")]
    for path in run_dir.glob("events-*.jsonl"):
        rank = int(path.stem.partition("-")[2])
        events += [{"rank": rank, **row} for row in read_rows(path)]
    return sorted(events, key=lambda event: float(event["time"]))


def rank_events_path(run_dir: Path, rank: int) -> Path:
    """Where rank `rank` writes its events."""
    return run_dir / f"events-{rank}.jsonl"


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """Where the output of rank `rank` goes, raw."""
    return run_dir / "logs" / f"rank-{rank:03d}.log"
