"""A job from request to result: describe the task, plan, make the run folder, supervise, conclude.

Used by every verb that trains: `train`, `check`, and the tests. Nothing else starts ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES, preload_for
from allranks.config import Resolved
from allranks.errors import Interrupted, PlaceError, RequestError
from allranks.job import Job
from allranks.launch.report import error_of, first_fault
from allranks.launch.server import ForkServer
from allranks.launch.supervisor import Process, supervise
from allranks.places import local
from allranks.places.base import Plan, Shape
from allranks.record import (
    RunFolder,
    rank_events_path,
    rank_log_path,
    read_rows,
)

WORKER = ENGINES["torch"]
_runs = itertools.count(1)


@dataclass(frozen=True)
class Result:
    """A job that ended well: its run folder, and the summary that its leader wrote."""

    run_dir: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class Watcher:
    """What a caller wants to see while a job runs. Both may be left as they are."""

    started: Callable[[Plan], None] = lambda plan: None
    tick: Callable[[], None] = lambda: None


def plan_job(resolved: Resolved, server: ForkServer) -> Plan:
    """The plan of a job: its task is loaded and read in a process of its own, nothing is left."""
    job = resolved.job
    if not job.run_dir:
        job = dataclasses.replace(job, run_dir=new_run_dir(job.program))
    job = dataclasses.replace(job, run_dir=os.path.abspath(job.run_dir))
    return local.plan(job, describe(server, job))


def run_job(
    resolved: Resolved, server: ForkServer | None = None, watcher: Watcher | None = None
) -> Result:
    """Run a job to its end on this machine and return its result.

    Raises `RequestError` (and leaves no run folder) if the request, the task or its data is wrong
    and no update was made; `ProgramError` with the first-fault report if the program failed;
    `Interrupted` after Ctrl-C or SIGTERM. No process is left in any case.
    """
    watcher = watcher or Watcher()
    with ExitStack() as stack:
        if server is None:
            server = stack.enter_context(ForkServer(preload_for(resolved.job.program)))
        plan = plan_job(resolved, server)
        fields = dataclasses.replace(plan.job, task=plan.shape.fields)
        folder = RunFolder(Path(plan.job.run_dir))
        stack.callback(folder.close)
        try:
            folder.write_job(Resolved(fields, resolved.sources))
            folder.events.event("started", ranks=plan.job.ranks, notes=list(plan.notes))
            watcher.started(plan)
            summary = _supervised(server, plan, folder, watcher)
        except RequestError:
            folder.remove()
            raise
        return Result(folder.path, {"run_dir": str(folder.path), **summary})


def _supervised(
    server: ForkServer, plan: Plan, folder: RunFolder, watcher: Watcher
) -> dict[str, Any]:
    processes = [
        Process(
            rank=rank.world.rank,
            target=f"{WORKER}:main",
            argument=plan.job.to_data(),
            environment=rank.environment,
            log=rank_log_path(folder.path, rank.world.rank),
        )
        for rank in plan.ranks
    ]
    ended = supervise(server, processes, watcher.tick)
    (folder.path / local.STORE).unlink(missing_ok=True)
    exits = {rank: exit_.code for rank, exit_ in sorted(ended.exits.items())}
    fault = first_fault(ended, folder.path)
    if ended.interrupted:
        folder.events.event("interrupted", exits=exits)
        raise Interrupted(f"interrupted; every rank is stopped. What there is: {folder.path}")
    if fault is not None:
        error = error_of(fault, ended, folder.path)
        folder.events.event("failed", first_rank=fault.rank, report=str(error), exits=exits)
        raise error
    for row in read_rows(rank_events_path(folder.path, 0)):
        if row["event"] == "done":
            folder.events.event("done", exits=exits)
            return dict(row["summary"])
    raise PlaceError(f"all ranks ended well, but {folder.path} holds no summary of the leader")


def describe(server: ForkServer, job: Job) -> Shape:
    """Load the task of `job` in a forked process and return what a place must know of it."""
    with tempfile.TemporaryDirectory(prefix="allranks-describe-") as scratch:
        run_dir = Path(scratch)
        (run_dir / "logs").mkdir()
        log = rank_log_path(run_dir, 0)
        argument = {**job.to_data(), "run_dir": scratch}
        process = Process(0, f"{WORKER}:describe", argument, {}, log)
        ended = supervise(server, [process])
        if ended.interrupted:
            raise Interrupted("interrupted before anything was started")
        fault = first_fault(ended, run_dir)
        if fault is not None and fault.event:
            raise error_of(fault, ended, run_dir)
        for row in read_rows(rank_events_path(run_dir, 0)):
            if row["event"] == "described":
                return Shape(**row["shape"])
        raise PlaceError(
            f"loading {job.program!r} ended its process:\n{log.read_text(errors='replace')}"
        )


def new_run_dir(program: str) -> str:
    """A new name under `runs/`: the program, the time, this process, and which run of it."""
    name = Path(program.partition(":")[0]).stem or "run"
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    return f"runs/{safe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_runs)}"
