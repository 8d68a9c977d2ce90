"""Files that the leader writes on request (`--log`) beside `metrics.jsonl`.

    metrics.csv      a line for each step, columns of metrics.jsonl; steps and epochs from 1
    evaluations.csv  a line for each metric of each evaluation on the way
    tensorboard/     event files (`tensorboard_log`)
    mlruns/          a run of MLflow (`mlflow_log`)
    phases/          of every rank its own (`phases`): no `Log`, which the leader writes

A resumed training has each step once in them: steps that its checkpoint does not know of are
dropped, and no others, because `flush` is called before each checkpoint. Nothing is read back from
a table: it is made anew from `metrics.jsonl` and the events, which are opened before.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from allranks.catalog import load
from allranks.checkpoint.files import write_whole
from allranks.checkpoint.folder import FULL, Elsewhere
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.limits import logs_of
from allranks.job.run_folder import (
    FLUSH_EVERY_S,
    REMOVED,
    JsonLines,
    keep_rows,
    leaders_evaluations,
    read_events,
    read_rows,
)
from allranks.training.progress import StepResult

LOGS = {
    "csv": "allranks.training.record.logs:CsvLog",
    "tensorboard": "allranks.training.record.tensorboard_log:TensorBoardLog",
    "mlflow": "allranks.training.record.mlflow_log:MlflowLog",
}
PACKAGES = ("tensorboard", "mlflow")
STEP_COLUMNS = (
    *("step", "epoch", "loss", "samples", "learning_rate", "monotonic"),
    *("grad_norm", "loss_scale", "bad"),
)
EVALUATION_COLUMNS = ("step", "metric", "value")

End = Literal["done", "stopped", "failed"]
"""How a training ended."""


class Log(Protocol):
    """One kind of further file. Called by the leader only."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of the metrics: `row["step"]` global batches were made before its step."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics after `step` global batches."""

    def flush(self) -> None:
        """All that was given is in the files: a checkpoint follows."""

    def close(self, end: End) -> None:
        """Flush, and close the files; where they have a place for it, say how it ended."""


class Logs:
    """All that a job asks for, which may be nothing."""

    def __init__(self, logs: Iterable[Log] = ()) -> None:
        self._logs = tuple(logs)

    def row(self, row: Mapping[str, Any]) -> None:
        for log in self._logs:
            log.row(row)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        for log in self._logs:
            log.evaluation(step, metrics)

    def flush(self) -> None:
        for log in self._logs:
            log.flush()

    def close(self, end: End) -> list[str]:
        """Close all; returns the files that a full disk has not taken whole."""
        incomplete = list[str]()
        for log in self._logs:
            try:
                log.close(end)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                incomplete += reversed(
                    [Path(e.filename).name for e in _all_of(error) if e.filename]
                )
        return incomplete

    def fail(self) -> None:
        """Close all after a failure, which no trouble with a file is to hide."""
        for log in self._logs:
            with suppress(Exception):
                log.close("failed")


def _all_of(error: BaseException | None) -> Iterator[OSError]:
    """The errors of one close, the last first: of each file that it closed."""
    while isinstance(error, OSError):
        yield error
        error = error.__context__


def check_logs(job: Job) -> None:
    """Raise `RequestError` if what a log is written with is not installed; imports nothing."""
    for name in PACKAGES:
        if name in logs_of(job) and importlib.util.find_spec(name) is None:
            raise RequestError(
                asked=f"--log {job.log}",
                found=f"no package {name} in this Python",
                why="its files are written with what defines their format",
                do=f"pip install 'allranks[{name}]', or leave it out of --log",
            )


def open_logs(job: Job, step: int) -> Logs:
    """The logs of a job of which `step` global batches are done, without what came after them.

    The leader calls this once its metrics are open.
    """
    names = dict.fromkeys(logs_of(job))
    return Logs([load(LOGS[name])(Path(job.run_dir), step) for name in names if name in LOGS])


def counted(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the metrics as people count: `step` steps are done with it, the first epoch is 1.

    In `metrics.jsonl` both are indices from 0, as in `batch.index`. It alone has the `culprits` of
    a bad step, which are no number and fit in no column.
    """
    counts = {"step": int(row["step"]) + 1, "epoch": int(row["epoch"]) + 1}
    return {name: value for name, value in {**row, **counts}.items() if name != "culprits"}


def evaluations_before(run_dir: Path, step: int) -> dict[int, Mapping[str, float]]:
    """The leaders' metrics after each step up to `step`, in order; the newest of each step."""
    evaluated = leaders_evaluations(read_events(run_dir))
    once = {int(e["step"]): e["metrics"] for e in evaluated if int(e["step"]) <= step}
    return dict(sorted(once.items()))


class CsvLog:
    """Two tables. A column that a step has no value for is empty."""

    def __init__(self, run_dir: Path, step: int) -> None:
        rows = read_rows(run_dir / "metrics.jsonl")
        self._steps = _Table(run_dir / "metrics.csv", STEP_COLUMNS, map(counted, rows))
        before = evaluations_before(run_dir, step).items()
        lines = (line for at, metrics in before for line in _lines(at, metrics))
        self._evaluations = _Table(run_dir / "evaluations.csv", EVALUATION_COLUMNS, lines)

    def row(self, row: Mapping[str, Any]) -> None:
        self._steps.add(counted(row))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        for line in _lines(step, metrics):
            self._evaluations.add(line)

    def flush(self) -> None:
        self._steps.file.flush()
        self._evaluations.file.flush()

    def close(self, end: End) -> None:
        with ExitStack() as stack:
            stack.callback(self._steps.file.close)
            stack.callback(self._evaluations.file.close)


def _lines(step: int, metrics: Mapping[str, float]) -> Iterable[dict[str, Any]]:
    return [{"step": step, "metric": name, "value": value} for name, value in metrics.items()]


class _Table:
    """A CSV file of these columns: a header, the `rows` there are, and what is added."""

    def __init__(self, path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]):
        self._text = io.StringIO(newline="")
        self._writer = csv.DictWriter(self._text, tuple(columns), lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(rows)
        write_whole(path, self._taken())
        self.file = GrowingFile(path)

    def add(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)
        self.file.write(self._taken())

    def _taken(self) -> bytes:
        """What was written to the text since the last call."""
        content = self._text.getvalue().encode()
        self._text.seek(0)
        self._text.truncate()
        return content


class GrowingFile:
    """A file that is added to. Bytes are kept for a moment, so that a step is cheap.

    What a full disk does not take is kept, and written with what comes next; only `close` raises.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)
        self._rest = bytearray()
        self._flushed = time.monotonic()

    def write(self, content: bytes) -> None:
        self._rest += content
        if time.monotonic() - self._flushed > FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        try:
            self._write()
        except OSError as error:
            if error.errno not in FULL:
                raise

    def _write(self) -> None:
        while self._rest:
            del self._rest[: self._file.write(self._rest) or 0]

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._write()
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._file.name) from None
            finally:
                self._file.close()


METRICS = "metrics.jsonl"


def open_metrics(run_dir: Path, step: int) -> JsonLines:
    """The metrics so far, without steps that a checkpoint at `step` does not know of."""
    path = run_dir / METRICS
    keep_rows(path, lambda row: int(row["step"]) < step)
    return JsonLines(path)


def row_of(result: StepResult) -> dict[str, Any]:
    """What is written of a step; what it does not have is left out."""
    row: dict[str, Any] = {
        "step": result.batch_index,
        "epoch": result.epoch,
        "loss": result.loss,
        "samples": result.samples,
        "learning_rate": result.learning_rate,
        "monotonic": time.monotonic(),
    }
    if result.grad_norm is not None:
        row["grad_norm"] = result.grad_norm
    if result.loss_scale is not None:
        row["loss_scale"] = result.loss_scale
    if result.bad:
        row |= {"bad": result.bad, "culprits": result.culprits}
    return row


# --- keeping -------------------------------------------------------------------------------------
# Saves the final files of a job, in another folder if the run folder has no space for them.
#
# The leader makes one. `elsewhere` lists files in another folder, with their paths; `lost` lists
# those that could not be saved; `incomplete` those that are partly written and can be made again.


ALL = "all of it"


class Keeping:
    """The files of one job; `report` is called for each that is not in the run folder."""

    def __init__(self, run_dir: Path, report: Callable[..., None]) -> None:
        self.run_dir, self._report = run_dir, report
        self._places = Elsewhere(run_dir)
        self.elsewhere: dict[str, dict[str, str]] = {}
        self.lost: dict[str, str] = {}
        self.incomplete: list[str] = []

    def whole(self, name: str, write: Callable[[Iterator[Path]], Path]) -> None:
        """Keep a file: `write` tries the paths in order, and returns the one that it took.

        It raises the `OSError` of the first if none has room.
        """
        try:
            path = write(self._paths(name))
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.lost[name] = str(error.strerror)
            self._report("not_kept", file=name, error=str(error.strerror))
            return
        if path.parent != self.run_dir:
            self._say_where(name, path, ALL)

    def keep_rows(self, name: str, content: bytes) -> None:
        """Save the rows that did not fit a file of the run folder, if there are any."""
        if not content:
            return
        rows = content.count(b"\n")
        there = (self.run_dir / name).read_bytes().count(b"\n")
        part = f"{rows:,} of {there + rows:,} rows"
        for path in self._places.places(name):
            try:
                write_where_room_is([path], len(content), lambda file: file.write(content))
            except OSError:
                continue
            return self._say_where(name, path, part)
        self.lost[name] = part
        self._report("not_kept", file=name, error=part)

    def removed(self, name: str) -> None:
        """Record that a file was removed by another program, and was begun again."""
        self.lost[name] = REMOVED
        self._report("not_kept", file=name, error=REMOVED)

    def to_data(self) -> dict[str, Any]:
        """The lists for the summary of the job; empty if all files are in the run folder."""
        lists = {
            "kept_elsewhere": self.elsewhere,
            "not_kept": self.lost,
            "incomplete_logs": self.incomplete,
        }
        return {name: values for name, values in lists.items() if values}

    def _paths(self, name: str) -> Iterator[Path]:
        yield self.run_dir / name
        yield from self._places.places(name)

    def _say_where(self, name: str, path: Path, part: str) -> None:
        if part == ALL and (self.run_dir / name).exists():
            part = f"{ALL}; the one in the run folder is of an earlier end"
        where = {"path": str(path), "host": socket.gethostname(), "holds": part}
        self.elsewhere[name] = where
        self._report("kept_elsewhere", file=name, where=where)


def write_where_room_is(
    paths: Iterable[Path], size_bytes: int, write: Callable[[BinaryIO], object]
) -> Path:
    """Write a file to the first path with room for all of it; returns that path.

    The file is there whole, or not at all. Its room is taken before `write(file)` is called, once.
    Raises the `OSError` of the first path if none has room.
    """
    path, file = _begun(paths, size_bytes)
    temporary = Path(file.name)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _begun(paths: Iterable[Path], size_bytes: int) -> tuple[Path, BinaryIO]:
    first: OSError | None = None
    for path in paths:
        temporary = path.with_name(f".{path.name}")
        try:
            file = open(temporary, "wb")
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except BaseException:
                file.close()
                temporary.unlink()
                raise
        except OSError as error:
            if first is None and error.errno not in FULL:
                raise
            first = first or error
            continue
        return path, file
    assert first is not None
    raise first
