"""What one run folder holds, read once: the job, the events, the rows of the metrics, placements.

A job may be writing meanwhile: a torn last line is not read, and what is not there yet is empty.
Nothing is written, and no framework is needed.
"""

from __future__ import annotations

import time
import tomllib
import traceback
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from allranks.catalog import TENSORFLOW
from allranks.checkpoint.folder import FOLDER as CHECKPOINTS
from allranks.checkpoint.folder import committed, step_of
from allranks.errors import RequestError
from allranks.job.job_file import SCHEMA, redacted
from allranks.job.place import RankPlacement, read_placements
from allranks.job.run_folder import is_in_use, read_events, read_rows
from allranks.launcher.heartbeat import PHASES
from allranks.training.record.phases import MemoryPeaks, held_in, phases_path

# --- outcome -------------------------------------------------------------------------------------
# How a run stands: its job, and from its events its state, its result and its first fault.


ENDS = ("done", "stopped", "failed", "interrupted")
RUNNING, KILLED = "running", "killed"


@dataclass(frozen=True)
class RunOutcome:
    """How a run stands; `state` is one of `ENDS`, `running`, or `killed` with its supervisor.

    `summary` is what the leader said at the end, `fault` the report of who failed first.
    """

    state: str
    summary: dict[str, Any] | None
    fault: str | None


def read_job(path: Path) -> dict[str, Any]:
    """The job of a run folder; raises `RequestError` where its file is not what a job writes."""
    try:
        job = tomllib.loads((path / "job.toml").read_text())
        return {**job, "program": job["program"], "ranks": job["ranks"]}
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(
            asked=f"to read {path / 'job.toml'}",
            found=f"{type(error).__name__}: {error}",
            why="it is not what a job writes",
            do="look at the file, or remove the folder",
        ) from None


def outcome_of(path: Path, events: Iterable[dict[str, Any]], is_running: bool) -> RunOutcome:
    """How the run in `path` stands by its events, which are in order of time."""
    summary, fault = None, None
    state = RUNNING if is_running else KILLED
    restarts = 0
    for event in events:
        if event["rank"] is None and event["event"] in ENDS:
            if not is_running:
                state, fault = event["event"], event.get("report")
        elif event["event"] == "attempt":
            summary, fault = None, None
            state = RUNNING if is_running else KILLED
        elif event["rank"] == 0 and event["event"] == "done":
            summary = {"run_dir": str(path), **event["summary"], "restarts": restarts}
        restarts = 0 if event["event"] == "started" else restarts + (event["event"] == "restart")
    return RunOutcome(state, summary, fault)


Event = dict[str, Any]
NEEDED = {
    "attempt": ("attempt",),
    "training": ("step", "monotonic"),
    "evaluated": ("step", "metrics"),
    "bad_step": ("step", "bad"),
}
"""What an event must have beside its name and its time, where it is read here."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
COMMAND = "run"  # the `kind` of a job that is a script of any framework
NO_EPOCH = -1
RATES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "loss_scale": "Loss scale of fp16",
}
"""What a row may have beside its loss, and what a chart calls it."""


class MetricsRow(NamedTuple):
    """One row of `metrics.jsonl`, without its rates; `step` steps are done with it."""

    step: int
    epoch: int | None
    samples: int
    loss: float
    monotonic: float


class MetricsRows:
    """The rows of `metrics.jsonl`, column by column: a long run has millions, of 70 bytes each."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.steps, self.samples, self._epochs = array("q"), array("q"), array("q")
        self.loss, self.monotonic = array("d"), array("d")
        self._rates = {name: (array("d"), bytearray()) for name in RATES}
        for row in rows:
            self._append(row)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[MetricsRow]:
        columns = self.steps, self._epochs, self.samples, self.loss, self.monotonic
        for step, epoch, samples, loss, monotonic in zip(*columns, strict=True):
            yield MetricsRow(step, None if epoch == NO_EPOCH else epoch, samples, loss, monotonic)

    def _append(self, row: dict[str, Any]) -> None:
        self.loss.append(float(row["loss"]))
        self.monotonic.append(float(row["monotonic"]))
        self.steps.append(int(row["step"]) + 1)
        self.samples.append(int(row["samples"]))
        self._epochs.append(int(row.get("epoch", NO_EPOCH)))
        for name, (values, is_there) in self._rates.items():
            value = row.get(name)
            is_there.append(value is not None)
            values.append(0.0 if value is None else float(value))

    def column(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """The steps whose rows have this number, and the numbers."""
        if name == "loss":
            return self.steps, self.loss
        values, is_there = self._rates[name]
        if all(is_there):
            return self.steps, values
        return array("q", compress(self.steps, is_there)), array("d", compress(values, is_there))


@dataclass(frozen=True)
class RecordedRun:
    """What a run has recorded up to `read_at` (wall clock); `label` tells it from other runs."""

    path: Path
    label: str
    job: dict[str, Any]
    outcome: RunOutcome
    events: tuple[Event, ...]
    rows: MetricsRows
    placements: tuple[RankPlacement, ...]
    checkpoints: tuple[int, ...]
    phases: dict[int, tuple[dict[str, Any], ...]]
    read_at: float

    @property
    def is_command(self) -> bool:
        """Whether it is a script that `allranks run` has started: no rank of it speaks."""
        return self.job.get("kind") == COMMAND

    @property
    def is_one_graph(self) -> bool:
        """Whether a step computes and communicates in one call, so that no rank tells them apart.

        TensorFlow's does: its ranks are in `exchange` all the while.
        """
        return self.job.get("engine") == TENSORFLOW

    @property
    def ranks(self) -> int:
        """The ranks that were asked for."""
        return int(self.job["ranks"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What the leader said at the end; empty where it said nothing."""
        return self.outcome.summary or {}

    @cached_property
    def speakers(self) -> tuple[int, ...]:
        """The ranks that appear: those of the job, and servers or evaluators on top that spoke."""
        spoke = {event["rank"] for event in self.events if event["rank"] is not None}
        return tuple(sorted(spoke | set(range(self.ranks))))

    def of(self, name: str, rank: int | None = None) -> list[Event]:
        """The events of this name that the supervisor wrote, or a rank, in order of time."""
        return [e for e in self.events if e["event"] == name and e["rank"] == rank]

    @cached_property
    def starts(self) -> dict[int, Event]:
        """Of each attempt that steps are left of: its first step, and what the leader said of it.

        An attempt that began from an earlier step has taken the place of what came before.
        """
        found: dict[int, Event] = {}
        for event in self.of("training", 0):
            first = int(event["step"])
            found = {step: one for step, one in found.items() if step < first} | {first: event}
        return found

    @cached_property
    def held(self) -> dict[int, MemoryPeaks]:
        """The most memory that each rank had in use at once, of those that said it."""
        return held_in(self.events)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """On which host each rank was last, of those that are known."""
        found = {}
        for event in self.events:
            if event["event"] == "ready" and event["rank"] is not None and event.get("host"):
                found[event["rank"]] = str(event["host"])
            elif event["event"] == "attempt" and event.get("hosts"):
                names = [host["name"] for host in event["hosts"] for _ in range(host["processes"])]
                found.update(enumerate(map(str, names)))
        return found

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The hosts, in the order of their first rank."""
        return tuple(dict.fromkeys(self.hosts[rank] for rank in sorted(self.hosts)))


def read_run(path: Path, label: str) -> RecordedRun:
    """The records of a run folder; raises `RequestError` where it is none, or not to be read."""
    if not (path / "job.toml").is_file():
        raise RequestError(
            asked=f"report {path}",
            found="an empty folder" if _is_empty(path) else "no job.toml in it",
            why="a run folder always has one",
            do="see `allranks runs` for those there are",
        )
    job = read_job(path)
    if job.get("schema") != SCHEMA:
        raise RequestError(
            asked=f"report {path}",
            found=f"schema {job.get('schema')} in its job.toml",
            why=f"this version reads schema {SCHEMA}",
            do="report it with the version of allranks that trained it",
        )
    with understood([path]):
        run = _read(path, label, job)
    if not run.events:
        raise RequestError(
            asked=f"report {path}",
            found="a job.toml and no events",
            why="nothing was started in it, so there is nothing to tell",
            do="start it: allranks train --job " + str(path / "job.toml"),
        )
    return run


@contextmanager
def understood(paths: Sequence[Path]) -> Iterator[None]:
    """Within, what the records of these runs cannot be read as is a `RequestError`.

    Its `found` says where it came up: a report reads files that somebody may have changed.
    """
    try:
        yield
    except UNREADABLE as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        raise RequestError(
            asked=f"report {' '.join(map(str, paths))}",
            found=f"{type(error).__name__}: {error} (at {where})",
            why="its records are not what a job writes",
            do="look at its events*.jsonl and metrics.jsonl",
        ) from error


def _read(path: Path, label: str, job: dict[str, Any]) -> RecordedRun:
    is_running = is_in_use(path)  # before the events: an end that comes between is then in them
    events = read_events(path)
    for event in events:
        event["time"] = float(event["time"])
        for name in NEEDED.get(str(event["event"]), ()):
            event[name]
    rows = MetricsRows(read_rows(path / "metrics.jsonl"))
    task = redacted(job.get("task", {}))
    return RecordedRun(
        path=path,
        label=label,
        job={**redacted(job), "task": task},
        outcome=outcome_of(path, events, is_running),
        events=tuple(events),
        rows=rows,
        placements=tuple(read_placements(path, int(job["ranks"]))),
        checkpoints=tuple(sorted(step_of(one) for one in committed(path / CHECKPOINTS))),
        phases=_phases(path, int(job["ranks"])),
        read_at=time.time(),
    )


def _phases(path: Path, ranks: int) -> dict[int, tuple[dict[str, Any], ...]]:
    """The rows of `--log phases` by rank, checked; empty where the job was not asked for them."""
    found = {}
    for rank in range(ranks):
        rows = tuple(read_rows(phases_path(path, rank)))
        for row in rows:
            row["step"], row["attempt"] = int(row["step"]), int(row["attempt"])
            row["from"] = float(row["from"])
            row["spans"] = [(PHASES[number], int(a), int(us)) for number, a, us in row["spans"]]
        if rows:
            found[rank] = rows
    return found


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def labels_of(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart: the last folder, or more of them."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]
