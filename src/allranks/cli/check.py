"""`allranks check PROGRAM`: is the result the same as in one process?"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from allranks.catalog import preload_for
from allranks.check.against_one import Verdict, check_against_one
from allranks.cli.options import job_options, resolved_from
from allranks.errors import (
    EXIT_DIFFERENCE_FOUND,
    Interrupted,
    ProgramError,
    RequestError,
    Stopped,
)
from allranks.job import Job
from allranks.launch.server import ForkServer
from allranks.record import as_json

STEPS = 20


@click.command()
@click.argument("program", required=False)
@click.option("--strategy", help="The strategy to check (default ddp).")
@click.option("--keep-runs", type=click.Path(), help="Keep the runs and their traces here.")
@job_options
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check(program: str | None, keep_runs: str | None, as_object: bool, **flags: Any) -> None:
    """Train PROGRAM and one process side by side, and tell the first difference.

    In fp64 unless asked otherwise, over 20 steps. Exit code 0: equal; 5: a difference.

    \b
    allranks check digits --strategy ddp --ranks 3
    """
    if flags["job_file"] is None:
        defaults = {"strategy": "ddp", "precision": "fp64", "ranks": 2}
        flags |= {n: value for n, value in defaults.items() if flags[n] is None}
    if flags["steps"] is None:
        flags["steps"] = STEPS
    resolved = resolved_from(program, flags)
    if resolved.job.engine != "torch":
        raise RequestError(
            asked=f"check with the {resolved.job.engine} engine",
            found="no record of the insides of its steps",
            why="a check compares samples, gradients and weights of every step with one process",
            do="--engine torch for a Keras task; or compare `weights_sha256` and `train_loss` of "
            "`train --strategy single` with those of the other strategy",
        )
    with (
        tempfile.TemporaryDirectory(prefix="allranks-check-") as scratch,
        ForkServer(preload_for(resolved.job.program, resolved.job.engine)) as server,
    ):
        try:
            verdict = check_against_one(resolved, Path(keep_runs or scratch), server)
        except (Stopped, Interrupted) as error:  # what it ran goes on nowhere
            raise Interrupted("the check was stopped before it had an answer") from error
        except ProgramError as error:
            if keep_runs:
                raise
            again = "that folder was temporary: repeat with --keep-runs FOLDER to keep it"
            raise ProgramError(f"{error}\n{again}") from error
    click.echo(_in_sentences(verdict, resolved.job), err=as_object)
    if as_object:
        click.echo(as_json(_as_data(verdict, resolved.job)))
    if not verdict.equal:
        sys.exit(EXIT_DIFFERENCE_FOUND)


def _in_sentences(verdict: Verdict, job: Job) -> str:
    found = verdict.comparison
    what = f"{job.program} under {job.strategy} on {job.ranks} ranks, {job.precision}"
    if verdict.one_process:
        lines = [
            f"different: {job.program} in one process, {job.precision}, with itself",
            "it gives two answers when its shards go through the model one by one: random numbers "
            "that the engine cannot see, or samples that depend on each other",
            str(found.first),
        ]
    elif found.first is not None:
        lines = [f"different: {what}", str(found.first)]
    elif not verdict.evaluation_equal:
        lines = [f"different: {what}", f"evaluation differs after {found.steps} equal steps"]
    else:
        limit = (
            "equal bits" if verdict.tolerance.exact else f"within {verdict.tolerance.tensors:.1e}"
        )
        lines = [f"equal: {what}, {found.steps} steps, {limit}"]
        lines.append(f"largest difference: {found.largest:.1e} ({found.largest_at})")
    return "\n".join([*lines, "not checked: " + "; ".join(verdict.not_checked)])


def _as_data(verdict: Verdict, job: Job) -> dict[str, Any]:
    first = verdict.comparison.first
    return {
        "equal": verdict.equal,
        "program": job.program,
        "strategy": job.strategy,
        "ranks": job.ranks,
        "precision": job.precision,
        "bitwise": job.bitwise,
        "steps": verdict.comparison.steps,
        "tolerance": verdict.tolerance.tensors,
        "largest_difference": verdict.comparison.largest,
        "one_process": verdict.one_process,
        "evaluation_equal": verdict.evaluation_equal,
        "first_difference": None
        if first is None
        else {
            "step": first.step,
            "stage": first.stage,
            "tensor": first.tensor,
            "size": first.size,
            "found": first.found,
            "hint": first.hint,
        },
        "not_checked": list(verdict.not_checked),
    }
