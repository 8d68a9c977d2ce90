"""`allranks check PROGRAM`: is the result the same as in one process?"""

from __future__ import annotations

import sys
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.grouped_help import GroupedCommand
from allranks.cli.options import job_options, resolved_from
from allranks.errors import EXIT_DIFFERENCE_FOUND
from allranks.tools.check.plan import STEPS, USUAL_STRATEGY, default_ranks
from allranks.tools.check.scratch import checked_in_scratch


@click.command(cls=GroupedCommand)
@click.argument("program", required=False)
@click.option("--strategy", help="The strategy to check (default ddp).")
@click.option("--keep-runs", type=click.Path(), help="Keep the runs and their traces here.")
@job_options
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check(program: str | None, keep_runs: str | None, as_object: bool, **flags: Any) -> None:
    """Train PROGRAM and one process side by side, and tell the first difference.

    In float64 on 2 and on 3 ranks, then in the precision of the job (--precision), over 20 steps.
    Exit code 0: equal; 5: a difference.

    \b
    allranks check digits --strategy ddp --ranks 3
    """
    given = flags["job_file"] is not None or bool(flags["ranks"] or flags["nodes"])
    bounded = flags["steps"] is None
    flags["steps"] = flags["steps"] or STEPS
    if flags["job_file"] is None:
        flags["strategy"] = flags["strategy"] or USUAL_STRATEGY
        if not given:
            flags["ranks"] = default_ranks(flags["strategy"])
    resolved = resolved_from(program, flags)
    verdict = checked_in_scratch(resolved, keep_runs, given=given, bounded=bounded)
    click.echo(str(verdict), err=as_object)
    if as_object:
        click.echo(as_json(verdict.to_data()))
    if not verdict.equal:
        sys.exit(EXIT_DIFFERENCE_FOUND)
