"""`allranks train PROGRAM`: train a task on the ranks of this machine."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from allranks.catalog import preload_for
from allranks.cli.options import course_options, job_options, protection_options, resolved_from
from allranks.cli.placement import table
from allranks.cli.progress import in_sentences, progress_here
from allranks.cli.sweep import sweep as run_sweep
from allranks.config import Resolved
from allranks.errors import RequestError
from allranks.launch.placing import place_ranks
from allranks.launch.server import ForkServer
from allranks.launch.start import Watcher, plan_job, run_job
from allranks.record import as_json


@click.command()
@click.argument("program", required=False)
@click.option("--strategy", help="How ranks work together: see `allranks strategies`.")
@click.option("--epochs", type=int, help="Passes over the data (a field of the task).")
@click.option("--run-dir", help="The run folder to make (default runs/PROGRAM-TIME).")
@job_options
@course_options
@protection_options
@click.option("--sweep", multiple=True, help="A job for each value: lr=1e-3,3e-4 (and again).")
@click.option("--slots", type=click.IntRange(min=1), help="Jobs of a sweep at once (default 1).")
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--placement", is_flag=True, help="With --dry-run: what each rank would hold.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def train(
    program: str | None,
    sweep: tuple[str, ...],
    slots: int | None,
    dry_run: bool,
    placement: bool,
    as_object: bool,
    **flags: Any,
) -> None:
    """Train PROGRAM: a built-in name, file.py, file.py:Class or module:Class.

    \b
    allranks train digits --ranks 2
    allranks train mytask.py --ranks 4 --bitwise --set lr=3e-4
    allranks train mytask.py --ranks 4 --checkpoint-every 100 --max-restarts 3
    allranks train --run-dir runs/that-one          (goes on where it stopped)
    allranks train digits --sweep lr=1e-3,3e-4 --sweep width=16,32 --slots 2
    """
    if sweep or slots is not None:
        run_sweep(click.get_current_context())
        return
    resolved = resolved_from(program, flags)
    if placement and not dry_run:
        raise RequestError(
            asked="--placement",
            found="no --dry-run",
            why="a training records by itself what each rank holds, after its first update",
            do="--dry-run --placement, or after the start: allranks show RUN --placement",
        )
    if dry_run:
        _print_plan(resolved, placement, as_object)
        return
    progress = progress_here()
    try:
        result = run_job(resolved, watcher=Watcher(progress.started, progress.tick))
    finally:
        with suppress(OSError):  # nobody reads any more
            progress.close()
    click.echo(as_json(result.summary) if as_object else in_sentences(result.summary))


def _print_plan(resolved: Resolved, placement: bool, as_object: bool) -> None:
    """What would run; with `placement` also what each rank would hold."""
    with ForkServer(preload_for(resolved.job.program)) as server:
        plan = plan_job(resolved, server)
        held = place_ranks(plan, server) if placement else []
    if as_object:
        data = {**plan.to_data(), "sources": resolved.sources}
        more = {"placement": [rank.to_data() for rank in held]} if placement else {}
        click.echo(as_json({**data, **more}))
    else:
        click.echo(f"{plan}\n\n{table(held)}" if placement else str(plan))
