"""The run folder: everything that a job leaves behind, one writer per file, readable meanwhile.

    job.toml            the job, with the source of every value          (supervisor)
    events.jsonl        what the supervisor saw                          (supervisor)
    events-R.jsonl      what rank R has to say                           (rank R)
    metrics.jsonl       loss, rate, samples of each step                 (leader)
    digests.jsonl       digests of the state now and then                (leader)
    logs/rank-RRR.log   what rank R printed, raw                         (rank R)
    logs/hang-A.txt     where every rank stood when attempt A hung       (supervisor)
    placement/          what every rank holds on which device            (each rank its own file)
    checkpoints/        a folder for each, good only with its manifest  (all ranks, then the leader)
    weights.safetensors the weights at the end                           (leader)
    average.safetensors their moving average, if the task keeps one      (leader)
    metrics.csv, evaluations.csv, tensorboard/, mlruns/   on request, `--log`   (leader)
    phases/             on request, `--log phases`      (each rank its own file)
    report.html         a page to look at                                (`allranks report`)
    trace/              with `check` only: every step in full            (each rank its own files)

A run folder in use holds a lock that the kernel drops when its supervisor dies, however it dies.
Values that look like secrets are not written into it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from allranks.checkpoint.files import as_json, write_whole
from allranks.checkpoint.folder import FOLDER, FULL, committed, give_back, reserve, take
from allranks.errors import PlaceError, RequestError
from allranks.job.config import Resolved
from allranks.job.job import FOR_CHECK, SCHEMA, redacted, write_toml

FLUSH_EVERY_S = 0.25
LOOK_EVERY_S = 1.0
RESERVED_BYTES = 64 << 10  # for the summary of a job, or the report of its end
FIRST_BYTES = 8 << 10  # for the first events of a process, or the report that it has failed
FIRST_FILES = 3  # names beside events and logs: that by which ranks meet, metrics, what is renamed
REMOVED = "what it had before somebody removed it"
LAST_EVENTS = ("done", "failed", "stopped", "interrupted", "kept_elsewhere", "not_kept", "held")


class RunFolder:
    """A run folder that this process owns: created, locked, and removed again if nothing ran."""

    def __init__(self, path: Path, *, resumes: bool = False) -> None:
        """Create `path` and lock it; raises `RequestError` if it is in use, or not empty.

        With `resumes` it is there already, left by the job that goes on; it is never removed.
        """
        self.path, self.resumes = path, resumes
        self._made: list[Path] = []
        try:
            there = path.exists() and (not path.is_dir() or any(path.iterdir()))
            if there and (not resumes or is_in_use(path)):
                raise _taken(path)
            self._made = [p for p in (path, *path.parents) if not p.exists()]
            (path / "logs").mkdir(parents=True, exist_ok=resumes)
            self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise _taken(path) from None
        except OSError as error:
            self._undo()
            raise _not_written(path, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody was quicker
            os.close(self._lock)
            raise _taken(path) from None
        try:
            self._begin()
        except OSError as error:
            os.close(self._lock)
            self._undo(".lock", "events.jsonl")
            raise _not_written(path, error) from None
        self._job_written: bytes | None = None
        self._looked_at = time.monotonic()
        self.removed = dict[str, str]()
        """The files that somebody has removed while the job ran, with what is lost."""

    def _begin(self) -> None:
        path = self.path
        self.attempts: int = sum(
            row["event"] == "attempt" for row in read_rows(path / "events.jsonl")
        )
        self._job_before = _content(path / "job.toml")
        self._sizes_before = {file: file.stat().st_size for file in self._told()}
        self._remove_leftovers()
        self.events = JsonLines(path / "events.jsonl")

    def _undo(self, *files: str) -> None:
        """Remove what was made, with these files in it: it cannot be a run folder."""
        if not self.resumes:
            for name in files:
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.path / "logs", *self._made):
                with suppress(OSError):  # somebody's own, or not made
                    folder.rmdir()

    def take_room(self, ranks: Iterable[int], *, with_events: bool = True) -> None:
        """Take room for what these ranks say first; raises `RequestError` if the disk has none.

        A rank that can write nothing leaves without a word, so none is started then. With
        `with_events=False` they are those of a command, which have a log alone.
        """
        spare = [self.path / f".room-{number}" for number in range(FIRST_FILES)]
        try:
            take(self.events.path, FIRST_BYTES)
            for rank in ranks:
                rank_log_path(self.path, rank).touch()
                if with_events:
                    take(rank_events_path(self.path, rank), FIRST_BYTES)
            for path in spare:
                take(path, 1)
        except OSError as error:
            raise _not_written(self.path, error) from None
        finally:
            for path in spare:
                path.unlink(missing_ok=True)

    def _told(self) -> list[Path]:
        """The files that a job only ever adds to, whatever it does."""
        return [*self.path.glob("events*.jsonl"), *(self.path / "logs").iterdir()]

    def _remove_leftovers(self) -> None:
        """What a killed supervisor left here under names of ours."""
        tables = (".metrics.jsonl.*", ".metrics.csv.*", ".evaluations.csv.*")
        weights = (".weights.safetensors", ".average.safetensors")
        for name in (".store-*", ".job.toml.*", ".scale.json*", *tables, *weights):
            for path in self.path.glob(name):
                path.unlink()

    def write_job(self, resolved: Resolved, proof: str = "") -> None:
        """Write `job.toml` whole: under another name first, then renamed.

        `proof` says whether the first steps were compared with one process.
        """
        values = resolved.job.to_data()
        for name in FOR_CHECK:
            values.pop(name)
        task = {n: "none" if v is None else v for n, v in redacted(values["task"]).items()}
        about = {"proof": proof} if proof else {}
        values = {"schema": SCHEMA, **about, **values, "task": task, "source": resolved.sources}
        self.write_job_file(write_toml(values).encode())

    def write_job_file(self, content: bytes) -> None:
        """Write `job.toml` whole; raises `RequestError` where the disk does not take it."""
        try:
            write_whole(self.path / "job.toml", content)
        except OSError as error:
            raise _not_written(self.path, error) from None
        self._job_written = content

    def change_job(self, **values: Any) -> None:
        """Write these values into `job.toml`, in place of those with which the job was started."""
        assert self._job_written is not None, "a job that runs was written"
        data = tomllib.loads(self._job_written.decode())
        self.write_job_file(write_toml({**data, **values}).encode())

    def keep_job_file(self) -> None:
        """Leave `job.toml` as it was before this job, where it was there."""
        if self._job_before not in (None, _content(self.path / "job.toml")):
            write_whole(self.path / "job.toml", self._job_before)

    def look_if_due(self) -> None:
        """Call `look` if `LOOK_EVERY_S` have passed since the last time."""
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self.look()

    def look(self) -> None:
        """See that the folder is still there; raises `PlaceError` where it was removed.

        `job.toml`, without which no run can be resumed, is written again, and events go on.
        """
        self._looked_at = time.monotonic()
        if self.events.is_unlinked and os.fstat(self._lock).st_nlink == 0:
            raise PlaceError(
                f"the run folder {self.path} was removed while the job ran, with its checkpoints "
                "and metrics: nothing that it computes could be kept. Look for what cleans up there"
            )
        self.events.flush()
        if self.events.was_removed and "events.jsonl" not in self.removed:
            self.removed["events.jsonl"] = REMOVED
            self.events.event("not_kept", file="events.jsonl", error=REMOVED)
        if self._job_written is not None and not (self.path / "job.toml").exists():
            write_whole(self.path / "job.toml", self._job_written)
            self.events.event("job_file_restored")

    def remove(self) -> None:
        """Leave no trace: nothing was trained. Folders that were made for it go, no others."""
        self.close()
        if self.resumes:
            for file in self._told():
                if file not in self._sizes_before:
                    file.unlink()
                elif file.stat().st_size > self._sizes_before[file]:
                    os.truncate(file, self._sizes_before[file])
            self.keep_job_file()
            return
        for inside in self.path.iterdir():
            shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
        for parent in self._made:
            if any(parent.iterdir()):
                break
            parent.rmdir()

    def close(self) -> None:
        """Release the lock; the folder stays."""
        with suppress(OSError):  # what a full disk did not take; it hides no other error
            self.events.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _taken(path: Path) -> RequestError:
    in_use = is_in_use(path)
    is_training = not in_use and (path / "metrics.jsonl").is_file()
    if is_training and not any(committed(path / FOLDER)):
        return RequestError(
            asked=f"--run-dir {path}",
            found="a run that kept no checkpoint to go on from",
            why="a job never writes over what another one left",
            do="name a folder that does not exist yet; with --checkpoint-every N it can be resumed",
        )
    return RequestError(
        asked=f"--run-dir {path}",
        found="a run folder in use by a running job" if in_use else "something is there already",
        why="a job never writes over what another one left",
        do="name a folder that does not exist yet" + (", or wait for that job" if in_use else ""),
    )


def check_is_run(path: Path, request: str) -> None:
    """Raise `RequestError`, as the answer to `request`, if `path` is not a run folder."""
    if (path / "job.toml").is_file():
        return
    is_empty = path.is_dir() and not any(path.iterdir())
    in_folder = "an empty folder: no job.toml in it" if is_empty else "no job.toml in it"
    raise RequestError(
        asked=request,
        found=in_folder if path.is_dir() else f"no folder {path}",
        why="a run is a folder with the job.toml that its job wrote",
        do="see `allranks runs` for those there are",
    )


def is_in_use(path: Path) -> bool:
    """Whether a living supervisor holds this run folder; it need not be writable here."""
    try:
        lock = os.open(path / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _not_written(path: Path, error: OSError) -> RequestError:
    is_full = error.errno in FULL
    return RequestError(
        asked=f"--run-dir {path}",
        found=f"its disk is full: {error.strerror}" if is_full else str(error),
        why="a job writes its log, its metrics and its weights there",
        do="make room there, or name a folder on another disk"
        if is_full
        else "name a folder that can be written",
    )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


class JsonLines:
    """A file of JSON lines with one writer. Lines are kept for a moment, so that a step is cheap.

    The torn last line of a writer that was killed is cut off; `stamp` is added to every event. What
    a full disk does not take is kept, and written with what comes next; only `close` raises then.
    A file of events has room reserved for the last ones, which others do not use: they wait.

    An unlinked file would take every line: the file is looked at wherever lines are written, and
    begun again where somebody has removed it. `was_removed` says so.
    """

    def __init__(self, path: Path, **stamp: Any) -> None:
        _cut_torn_line(path)
        self.path, self.was_removed = path, False
        self._stamp = stamp
        self._lock = threading.Lock()  # a save reports from a thread of its own
        self._file = open(path, "ab", buffering=0)
        self._lines: list[str] = []
        self._unwritten = b""  # of what was to be written, what is not in the file yet
        self._full = errno.ENOSPC  # what the disk said last: it may be a quota
        self._flushed = time.monotonic()
        self._waiting: list[str] = []  # events that may not take the room of the last ones
        self._reserved_to = 0

    def event(self, name: str, **values: Any) -> None:
        """Write one event at once, with the wall clock and this host's monotonic clock."""
        now = {"event": name, "time": time.time(), "monotonic": time.monotonic()}
        with self._lock:
            line = as_json({**now, **self._stamp, **values})
            if self._has_room_beside_the_last(len(line)):
                self._lines += [*self._waiting, line]
                self._waiting.clear()
            elif name in LAST_EVENTS:
                self._lines.append(line)
            else:
                self._waiting.append(line)
            self._write()

    def _has_room_beside_the_last(self, length: int) -> bool:
        """Whether an event leaves the room of the last ones free, which is reserved anew here.

        Where a file system cannot reserve, all of them take what room there is.
        """
        if self._file.closed:
            return True
        end = os.fstat(self._file.fileno()).st_size
        if self._reserved_to - end - length >= RESERVED_BYTES // 2:
            return True
        error = reserve(self._file.fileno(), RESERVED_BYTES + length)
        if not error:
            self._reserved_to = end + RESERVED_BYTES + length
        return error not in FULL

    def row(self, values: dict[str, Any]) -> None:
        """Add one row; it reaches the file within `FLUSH_EVERY_S` of the next row, or at close."""
        self._lines.append(as_json(values))
        if time.monotonic() - self._flushed > FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            self._write()

    @property
    def is_unlinked(self) -> bool:
        """Whether no folder names the open file any more."""
        return not self._file.closed and os.fstat(self._file.fileno()).st_nlink == 0

    def _begin_again(self) -> None:
        """Go on in a new file of the same name; where the folder is gone, nothing can be kept."""
        with suppress(OSError):
            new = open(self.path, "ab", buffering=0)
            self._file.close()
            self._file, self._reserved_to, self.was_removed = new, 0, True

    def _write(self) -> None:
        if self.is_unlinked:
            self._begin_again()
        if not self._file.closed:
            self._unwritten += "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        self._flushed = time.monotonic()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._full = error.errno

    def take_waiting(self) -> bytes:
        """Remove and return the events that did not fit on a full disk, to be saved elsewhere."""
        with self._lock:
            rows = "".join(f"{line}\n" for line in self._waiting).encode()
            self._waiting.clear()
        return rows

    def hand_over(self) -> None:
        """Close the file as it is after `flush`: another process goes on with its name."""
        self._file.close()

    def close(self) -> None:
        self._finish()
        unwritten, self._unwritten = self._unwritten, b""
        if unwritten:
            raise OSError(self._full, os.strerror(self._full), self._file.name)

    def close_with_unwritten(self) -> bytes:
        """Close; returns the lines that a full disk did not take, the first one whole."""
        self._finish()
        unwritten, self._unwritten = self._unwritten, b""
        return _cut_torn_line(Path(self._file.name)) + unwritten if unwritten else b""

    def _finish(self) -> None:
        with self._lock:
            self._lines += self._waiting
            self._waiting.clear()
            self._write()
        if not self._file.closed:
            give_back(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_torn_line(path: Path) -> bytes:
    content = _content(path) or b""
    whole = content.rfind(b"\n") + 1
    if len(content) > whole:
        os.truncate(path, whole)
    return content[whole:]


def keep_rows(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSON-lines file atomically with only those rows; not while it is written to."""
    if path.exists():
        lines = [as_json(row) + "\n" for row in read_rows(path) if is_kept(row)]
        write_whole(path, "".join(lines).encode())


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


def leaders_evaluations(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events `evaluated` of rank 0, and of ranks that led a later group of an elastic job."""
    leaders = {0, *(event["rank"] for event in events if event["event"] == "group")}
    return [e for e in events if e["event"] == "evaluated" and e["rank"] in leaders]


def rank_events_path(run_dir: Path, rank: int) -> Path:
    """The file of the events of rank `rank`."""
    return run_dir / f"events-{rank}.jsonl"


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """The file of the raw output of rank `rank`."""
    return run_dir / "logs" / f"rank-{rank:03d}.log"
