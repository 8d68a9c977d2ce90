"""How a run stands: its job, and from its events its state, its result and its first fault."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError

ENDS = ("done", "stopped", "failed", "interrupted")
RUNNING, KILLED = "running", "killed"


@dataclass(frozen=True)
class Outcome:
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


def outcome_of(path: Path, events: Iterable[dict[str, Any]], is_running: bool) -> Outcome:
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
    return Outcome(state, summary, fault)
