"""`allranks train PROGRAM`: train a task on the ranks of this machine."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from allranks.catalog import preload_for
from allranks.cli.options import job_options, protection_options, resolved_from
from allranks.cli.progress import Progress, in_sentences
from allranks.launch.server import ForkServer
from allranks.launch.start import Watcher, plan_job, run_job
from allranks.record import as_json


@click.command()
@click.argument("program", required=False)
@click.option("--strategy", help="How ranks work together: see `allranks strategies`.")
@click.option("--epochs", type=int, help="Passes over the data (a field of the task).")
@click.option("--run-dir", help="The run folder to make (default runs/PROGRAM-TIME).")
@job_options
@protection_options
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def train(program: str | None, dry_run: bool, as_object: bool, **flags: Any) -> None:
    """Train PROGRAM: a built-in name, file.py, file.py:Class or module:Class.

    \b
    allranks train digits --ranks 2
    allranks train mytask.py --ranks 4 --bitwise --set lr=3e-4
    allranks train mytask.py --ranks 4 --checkpoint-every 100 --max-restarts 3
    allranks train --run-dir runs/that-one          (goes on where it stopped)
    """
    resolved = resolved_from(program, flags)
    if dry_run:
        with ForkServer(preload_for(resolved.job.program)) as server:
            plan = plan_job(resolved, server)
        data = {**plan.to_data(), "sources": resolved.sources}
        click.echo(as_json(data) if as_object else str(plan))
        return
    progress = Progress()
    try:
        result = run_job(resolved, watcher=Watcher(progress.started, progress.tick))
    finally:
        with suppress(OSError):  # nobody reads any more
            progress.tick(last=True)
    click.echo(as_json(result.summary) if as_object else in_sentences(result.summary))
