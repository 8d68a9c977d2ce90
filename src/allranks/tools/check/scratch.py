"""A whole check: the plan, a fork server, a temporary folder, and the verdict.

The command line and the Python API call it, each with a job of its own making.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from pathlib import Path

from allranks.catalog import ENGINES
from allranks.errors import Interrupted, ProgramError, RequestError, Stopped
from allranks.job.config import Resolved
from allranks.job.engines import preload_for, trained_also_by
from allranks.job.job import Job
from allranks.job.place import LOCAL
from allranks.launcher.describe import describe
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.strategies.resolve import has_mesh
from allranks.tools.check.against_single import (
    TRACE_BYTES,
    CheckPlan,
    check_against_one,
    ranks_to_check,
)
from allranks.tools.check.approximate import check_approximate, is_approximate
from allranks.tools.check.verdict import Verdict


def checked_in_scratch(
    resolved: Resolved, keep_runs: str | None, *, explicit: bool, bounded: bool
) -> Verdict:
    """The verdict on a job; only the runs below `keep_runs`, if given, stay on disk.

    `explicit`: whether the user chose the number of ranks. `bounded`: whether steps may be left
    out, so that the records of a large model do not fill the disk.
    """
    check_that_it_traces(resolved.job.engine)
    if resolved.dial is not None:
        raise RequestError(
            asked=f"check --strategy {resolved.dial.text}",
            found="a strategy that is chosen when a job starts",
            why="a check compares one strategy with one process",
            do="name it: `train --dry-run` with the same words tells which it would be",
        )
    with (
        tempfile.TemporaryDirectory(prefix="allranks-check-") as scratch,
        ForkServer(preload_for(resolved.job.program, resolved.job.engine)) as server,
    ):
        try:
            shards = describe(LocalMachine(server), _here(resolved)).shards
            fits = partial(has_mesh, resolved.job.strategy or ENGINES[resolved.job.engine].many)
            ranks = resolved.job.ranks
            many, job_ranks = ranks_to_check(ranks, shards, explicit=explicit, fits=fits)
            if resolved.job.nodes > 1:
                many = (resolved.job.ranks,)  # other numbers may not fit on the nodes
            limit = TRACE_BYTES if bounded else 0
            plan = CheckPlan(many, job_ranks, shards, limit, keep=keep_runs is not None)
            return checked_in(Path(keep_runs or scratch), resolved, server, plan)
        except (Stopped, Interrupted) as error:  # what it ran goes on nowhere
            raise Interrupted("the check was stopped before it had an answer") from error
        except ProgramError as error:
            if keep_runs:
                raise
            again = "that folder was temporary: repeat with --keep-runs FOLDER to keep it"
            raise ProgramError(f"{error}\n{again}") from error


def checked_in(folder: Path, resolved: Resolved, server: ForkServer, plan: CheckPlan) -> Verdict:
    """The verdict on what the strategy's card promises; the runs are written to `folder`."""
    approximate = is_approximate(resolved.job, max((*plan.many, plan.job_ranks)))
    check = check_approximate if approximate else check_against_one
    return check(resolved, folder, server, plan)


def _here(resolved: Resolved) -> Job:
    return dataclasses.replace(
        resolved.job, nodes=1, place=LOCAL, ranks=1, strategy=ENGINES[resolved.job.engine].alone
    )


def check_that_it_traces(engine: str) -> None:
    """Raise `RequestError` for an engine whose steps cannot be compared."""
    if ENGINES[engine].traces:
        return
    task = ENGINES[engine].task
    able = [name for name in trained_also_by(engine) if ENGINES[name].traces]
    others = "".join(f"--engine {name} for {task}; or " for name in able)
    raise RequestError(
        asked=f"check with the {engine} engine",
        found="no record of the insides of its steps",
        why="a check compares samples, gradients and weights of every step with one process",
        do=f"{others}compare `weights_sha256` and `train_loss` of "
        "`train --strategy single` with those of the other strategy",
    )
