"""The records of one run folder, read once: the job, its events, metrics and placements.

A job may still be writing: an incomplete last line is skipped, and missing records are empty.
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
from allranks.job.job import SCHEMA, redacted
from allranks.job.place import RankPlacement, read_placements
from allranks.job.run_folder import check_is_run, is_in_use, read_events, read_rows
from allranks.launcher.heartbeat import PHASES
from allranks.tools.script_check.rules.facts import FACTS
from allranks.tools.script_check.rules.watch import Watched, watched_in
from allranks.training.record.phases import MemoryPeaks, held_in, phases_path

BENCH_RECORD = "bench.json"
CHECK_RECORD = "check.json"
"""The file that `allranks check --keep-runs FOLDER` writes to that folder."""
REPLAYS = "replays.jsonl"
"""What `allranks replay` has compared, a row for each replay; in the folder of the run."""

# --- outcome -------------------------------------------------------------------------------------
# The state of a run: its job, and from its events its state, its result and its first fault.


ENDS = ("done", "stopped", "failed", "interrupted")
RUNNING, KILLED = "running", "killed"


@dataclass(frozen=True)
class RunOutcome:
    """The state of a run: one of `ENDS`, `running`, or `killed` together with its supervisor.

    `summary` is the leader's at the end, `fault` the report of the rank that failed first.
    """

    state: str
    summary: dict[str, Any] | None
    fault: str | None


def read_job(path: Path) -> dict[str, Any]:
    """The job of a run folder; raises `RequestError` if a job did not write its file."""
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
    """The state of the run in `path`, from its events in order of time."""
    summary, fault = None, None
    state = RUNNING if is_running else KILLED
    restarts = leader = 0
    for event in events:
        if event["rank"] is None and event["event"] in ENDS:
            if not is_running:
                state, fault = event["event"], event.get("report")
        elif event["event"] == "attempt":
            summary, fault, leader = None, None, 0
            state = RUNNING if is_running else KILLED
        elif event["event"] == "group":
            leader = event["members"][0]
        elif event["rank"] == leader and event["event"] == "done":
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
"""The fields that this reader needs in an event, besides its name and its time."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
COMMAND = "run"  # the `kind` of a job that is a script of any framework
NO_EPOCH = -1
RATES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "loss_scale": "Loss scale of fp16",
}
"""The optional columns of a row, and their names in charts."""


class MetricsRow(NamedTuple):
    """One row of `metrics.jsonl`, without its rates; `step` counts from 1."""

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
    """The records of a run up to `read_at` (wall clock); `label` distinguishes it."""

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
    watched: Watched | None = None
    """What `allranks check -- COMMAND` found; `None` for a run that it did not watch."""

    @property
    def is_command(self) -> bool:
        """Whether it is a script that `allranks run` started: its ranks write no events."""
        return self.job.get("kind") == COMMAND

    @property
    def is_one_graph(self) -> bool:
        """Whether a step computes and communicates in one call, so that no rank can time both.

        This is so for TensorFlow: its ranks are always in `exchange`.
        """
        return self.job.get("engine") == TENSORFLOW

    @property
    def ranks(self) -> int:
        """The number of ranks of the job."""
        return int(self.job["ranks"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The leader's summary at the end; empty if there is none."""
        return self.outcome.summary or {}

    @cached_property
    def speakers(self) -> tuple[int, ...]:
        """The ranks on the page: those of the job, and servers or evaluators with events."""
        spoke = {event["rank"] for event in self.events if event["rank"] is not None}
        return tuple(sorted(spoke | set(range(self.ranks))))

    def of(self, name: str, rank: int | None = None) -> list[Event]:
        """The events of this name that a rank (`None`: the supervisor) wrote, in order of time."""
        return [e for e in self.events if e["event"] == name and e["rank"] == rank]

    @cached_property
    def starts(self) -> dict[int, Event]:
        """The first step of each attempt, with the leader's event.

        An attempt that began from an earlier step replaces the attempts after that step.
        """
        starts: dict[int, Event] = {}
        for event in self.of("training", 0):
            first = int(event["step"])
            starts = {step: e for step, e in starts.items() if step < first} | {first: event}
        return starts

    @cached_property
    def memory_peaks(self) -> dict[int, MemoryPeaks]:
        """The peak memory of each rank that has written it."""
        return held_in(self.events)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The last known host of each rank."""
        hosts = {}
        for event in self.events:
            if event["event"] == "ready" and event["rank"] is not None and event.get("host"):
                hosts[event["rank"]] = str(event["host"])
            elif event["event"] == "attempt" and event.get("hosts"):
                names = [host["name"] for host in event["hosts"] for _ in range(host["processes"])]
                hosts.update(enumerate(map(str, names)))
        return hosts

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The hosts, in the order of their first rank."""
        return tuple(dict.fromkeys(self.hosts[rank] for rank in sorted(self.hosts)))


def read_run(path: Path, label: str) -> RecordedRun:
    """The records of a run folder; raises `RequestError` if it is none, or cannot be read."""
    check_is_run(path, f"report {path}")
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
    """A context in which an unreadable record of these runs raises a `RequestError`.

    Its `found` names the line of code: a report reads files that somebody may have edited.
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
    is_running = is_in_use(path)  # before the events, which then hold an end that comes between
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
        checkpoints=tuple(sorted(step_of(folder) for folder in committed(path / CHECKPOINTS))),
        phases=_phases(path, int(job["ranks"])),
        read_at=time.time(),
        watched=read_watched(path),
    )


def read_watched(path: Path) -> Watched | None:
    """The findings on a script in this run folder; `None` if nothing watched it."""
    try:
        return watched_in(path / FACTS) if (path / FACTS).is_dir() else None
    except RequestError:  # no process of it wrote any
        return None


def _phases(path: Path, ranks: int) -> dict[int, tuple[dict[str, Any], ...]]:
    """The rows of `--log phases` by rank, checked; empty without that option."""
    phases = {}
    for rank in range(ranks):
        rows = tuple(read_rows(phases_path(path, rank)))
        for row in rows:
            row["step"], row["attempt"] = int(row["step"]), int(row["attempt"])
            row["from"] = float(row["from"])
            row["spans"] = [(PHASES[number], int(a), int(us)) for number, a, us in row["spans"]]
        if rows:
            phases[rank] = rows
    return phases


def labels_of(paths: list[Path]) -> list[str]:
    """The shortest unique ends of the paths: the last folder, or more of them."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]
