"""A whole check: the plan, a fork server, a temporary folder, and the verdict.

The command line and the Python API call it, each with a job of its own making.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from allranks.catalog import ENGINES
from allranks.errors import Interrupted, ProgramError, RequestError, Stopped
from allranks.job.config import Resolved
from allranks.job.engines import check_installed, preload_for, trained_also_by
from allranks.job.job import Job
from allranks.launcher.describe import describe
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.strategies.card import Approximate, Exact
from allranks.strategies.resolve import at_setting, has_mesh
from allranks.tools.check.against_single import (
    TRACE_BYTES,
    Check,
    CheckPlan,
    check_against_one,
    in_one,
    on_one_rank,
    ranks_to_check,
    undisturbed,
)
from allranks.tools.check.compare import FP64, RecordedTrace, Tolerance
from allranks.tools.check.verdict import Drift, Look, Verdict, drift_between
from allranks.training.record.trace import START


def checked_in_scratch(
    resolved: Resolved,
    keep_runs: str | None,
    *,
    explicit: bool,
    bounded: bool,
    deep: bool = False,
    announce: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """The verdict on a job; only the runs below `keep_runs`, if given, stay on disk.

    `explicit`: whether the user chose the number of ranks. `bounded`: whether steps may be left
    out, so that the records of a large model do not fill the disk. `deep`: whether the first
    operator that differs is named. `announce` is called with a line when a run begins.
    """
    check_installed(resolved.job.engine, resolved.job.program)
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
            shards = describe(LocalMachine(server), on_one_rank(resolved.job)).shards
            fits = partial(has_mesh, resolved.job.strategy or ENGINES[resolved.job.engine].many)
            ranks = resolved.job.ranks
            many, job_ranks = ranks_to_check(ranks, shards, explicit=explicit, fits=fits)
            if resolved.job.nodes > 1:
                many = (resolved.job.ranks,)  # other numbers may not fit on the nodes
            limit = TRACE_BYTES if bounded else 0
            plan = CheckPlan(many, job_ranks, shards, limit, keep_runs is not None, deep, announce)
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


# --- approximate ---------------------------------------------------------------------------------
# The check of a strategy that does not promise the result of one process.
#
# An APPROXIMATE card names a setting at which the strategy is exact. That setting is checked first,
# in float64: the same code runs, and the weights after every step must equal those of one process.
# Then the job and one process run freely, and their drift is reported step by step. The drift
# decides nothing. A REFERENCE card names no such setting, so only the drift is reported.


MADE = ("weight", "average", "buffer")
"""Stages that are equal at the exact setting: gradients of learners differ until they merge."""
SGD = "sgd:lr=0.01"


def is_approximate(job: Job, ranks: int) -> bool:
    """Whether the card promises no equality, so that a difference is no fault."""
    return ranks > 1 and not isinstance(job.strategy_spec.guarantee, Exact)


def check_approximate(
    resolved: Resolved, folder: Path, server: ForkServer, plan: CheckPlan
) -> Verdict:
    """Check the exact setting of the job's strategy, and measure the drift of the job as it is."""
    job = undisturbed(resolved.job)
    agreement = job.strategy_spec.card.agreement
    if agreement.is_one_training and not agreement.lockstep:
        raise RequestError(
            asked=f"check --strategy {job.strategy} --ranks {plan.job_ranks}",
            found=f"its card says: {job.strategy_spec.guarantee}",
            why="its ranks are at no step together, so no step of it can be compared",
            do="check it with --ranks 1, or another strategy",
        )
    guarantee = job.strategy_spec.guarantee
    looks: tuple[Look, ...] = ()
    exact_at: str | None = None
    if isinstance(guarantee, Approximate) and guarantee.setting:
        exact = exact_setting(job, guarantee)
        exact_at = exact.strategy
        check = Check(resolved, exact, folder / "exact", server, plan)
        looks, notes = _at_exact_setting(check, guarantee)
    else:
        notes = [
            f"whether it is right: its card names no setting at which it is exact, but is "
            f"{guarantee}"
        ]
    free = Check(resolved, job, folder / "asked", server, plan)
    drift = measured(free, job, exact_at, str(guarantee))
    return Verdict(job.program, job.strategy, looks, tuple(dict.fromkeys(notes)), drift)


def _at_exact_setting(check: Check, guarantee: Approximate) -> tuple[tuple[Look, ...], list[str]]:
    """The looks at that setting, and what they leave out."""
    check.looks += check.in_float64(exact_tolerance(guarantee))
    check.search_operators()
    looks, notes = tuple(check.looks), [*check.left_out()]
    if guarantee.plain_sgd:
        notes.append(f"the optimizer of the task: its card is exact for SGD, and {SGD} was taken")
        trace = RecordedTrace(check.folder / "fp64-reference" / "trace")
        start = trace.ranks[0][START] if trace.ranks else {}
        clips = start.get("facts", {}).get("clip_norm")
        if clips and any(look.first is not None for look in looks):
            raise RequestError(
                asked=f"check --strategy {check.job.strategy}",
                found=f"a task that clips gradients to {clips:g}",
                why=f"its card says: {guarantee}",
                do="--set clip_norm=none, if that is a field of the task",
            )
    return looks, notes


def exact_tolerance(guarantee: Approximate) -> Tolerance:
    """What is compared at the exact setting, and how closely."""
    return dataclasses.replace(FP64, stages=MADE) if guarantee.plain_sgd else FP64


def exact_setting(job: Job, guarantee: Approximate) -> Job:
    """The job at the setting at which its card says that it is exact."""
    exact = at_setting(job.strategy, guarantee.setting)
    optimizer = SGD if guarantee.plain_sgd else job.optimizer
    return dataclasses.replace(job, strategy=exact, optimizer=optimizer)


def measured(check: Check, job: Job, exact_at: str | None, promise: str) -> Drift:
    """The drift of the job from one process, both running freely."""
    job = dataclasses.replace(job, precision="fp64", ranks=check.plan.job_ranks)
    try:
        single = check.run("drift-one", in_one(job))
    except ProgramError:  # a task that cannot be computed in float64
        job = dataclasses.replace(job, precision=check.job.precision)
        single = check.run("drift-one-again", in_one(job))
    many = check.run("drift", job)
    try:
        return drift_between(single.trace, many.trace, job, exact_at, promise)
    finally:
        check.clear(single, many)
