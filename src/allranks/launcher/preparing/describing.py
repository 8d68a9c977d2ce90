"""What a job's own task says of itself, asked in a process that is forked for that and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES
from allranks.errors import Interrupted, PlaceError
from allranks.job.job import Job
from allranks.job.run_folder import rank_events_path, rank_log_path, read_rows
from allranks.launcher.fault_report import first_fault, user_error
from allranks.launcher.plan import Shape, backend_of_keras, devices_seen
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.processes.process import Process
from allranks.launcher.resources import Resources
from allranks.launcher.signals import Signals
from allranks.launcher.supervisor import supervise
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
    environment = {
        **devices_seen(job, Visible.from_environment()),
        **backend_of_keras(job),
    }
    shared = resources.shared(Path(job.run_dir))
    with scratch_folder(shared) as scratch:
        run_dir = Path(scratch)
        (run_dir / "logs").mkdir()
        log = rank_log_path(run_dir, 0)
        argument = {**job.to_data(), "run_dir": scratch}
        target = f"{ENGINES[job.engine].worker}:{function}"
        process = Process(0, target, argument, environment, log)
        ended = supervise(resources.server, [process], signals=signals)
        if ended.interrupted:
            raise Interrupted("interrupted before anything was started")
        fault = first_fault(ended, run_dir)
        if fault is not None and fault.event:
            raise user_error(fault, ended, run_dir)
        for row in read_rows(rank_events_path(run_dir, 0)):
            if row["event"] == event:
                return dict(row)
        raise PlaceError(
            f"loading {job.program!r} ended its process:\n{log.read_text(errors='replace')}"
        )
