"""What a job's own task says of itself, asked in a process that is forked for that and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES
from allranks.job.job import Job
from allranks.launcher.plan import Shape, backend_of_keras, devices_seen
from allranks.launcher.preparing.asking import answered
from allranks.launcher.resources import Resources
from allranks.launcher.signals import Signals
from allranks.launcher.world import Visible


def describe(resources: Resources, job: Job, signals: Signals | None = None) -> Shape:
    """Load the task of `job` in a forked process and return what a place must know of it."""
    return Shape(**asked_of_task(resources, job, "describe", "described", signals)["shape"])


def asked_of_task(
    resources: Resources, job: Job, function: str, event: str, signals: Signals | None = None
) -> dict[str, Any]:
    """The `event` that a `function` of the engine's worker writes of `job`, in a forked process.

    It runs where rank 0 would. Raises what the function raised, and leaves no file.
    """
    return answered(
        resources.server,
        f"{ENGINES[job.engine].worker}:{function}",
        lambda scratch: {**job.to_data(), "run_dir": scratch},
        event,
        {**devices_seen(job, Visible.from_environment()), **backend_of_keras(job)},
        what=f"the process that loads {job.program!r}",
        if_interrupted="nothing was started",
        shared=resources.shared(Path(job.run_dir)),
        signals=signals,
    )
