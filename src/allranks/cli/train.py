"""`allranks train PROGRAM`: train a task on the ranks of this machine, or of several nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import click

from allranks.catalog import NODES, load
from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import in_sentences, lost_in, progress_here, say
from allranks.cli.options import (
    COMMON,
    Verb,
    option_groups,
    rendezvous_from,
    rendezvous_options,
    resolved_from,
    training_options,
    words_of,
)
from allranks.errors import PlaceError, RequestError
from allranks.job.config import Resolved
from allranks.job.resume import how_to_resume
from allranks.launcher.describe import first_check
from allranks.launcher.places import AgentPlace, Rendezvous, find_place, is_head
from allranks.launcher.start import JobWatcher, plan_only, run_job

PLACEMENT = "allranks.cli.display.placement:placement_of"
"""Loaded only if --placement asks for it."""


@click.command(cls=Verb, groups=option_groups(), common=COMMON)
@click.argument("program", required=False)
@click.option("--run-dir", help="The run folder (default runs/PROGRAM-TIME).")
@training_options
@rendezvous_options
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option(
    "--placement", is_flag=True, help="With --dry-run: which weights each rank would hold."
)
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def train(
    program: str | None, dry_run: bool, placement: bool, as_object: bool, **flags: Any
) -> None:
    """Train PROGRAM: a built-in name, file.py, file.py:Class or module:Class.

    \b
    allranks train digits --ranks 2
    allranks train mytask.py --ranks 4 --bitwise --set lr=3e-4
    allranks train mytask.py --ranks 4 --checkpoint-every 100 --max-restarts 3
    allranks train --run-dir runs/that-one          (resumes where it stopped)
    """
    words = words_of(flags, "train", program or "")
    rendezvous, implied = rendezvous_from(flags)
    if not is_head(rendezvous):
        sys.exit(load(NODES).take_part(rendezvous, words, program or ""))
    resolved = resolved_from(program, {**flags, **implied})
    _check_placement(placement, dry_run)
    if dry_run:
        _print_plan(resolved, rendezvous, placement, as_object)
        return
    progress = progress_here()
    try:
        watcher = JobWatcher(progress.started, progress.tick)
        checked = partial(first_check, announce=say)
        result = run_job(
            resolved, watcher=watcher, rendezvous=rendezvous, words=words, first_check=checked
        )
    finally:
        with suppress(OSError):  # nobody reads any more
            progress.close()
    known = {**result.summary, "model_notes": ()}  # said when the training began
    click.echo(as_json(result.summary) if as_object else in_sentences(known))
    if result.summary.get("not_kept"):
        raise PlaceError(
            "\n".join([lost_in(result.summary), how_to_resume(result.run_dir)]).rstrip()
        )


def resolved_words(words: Sequence[str]) -> Resolved:
    """The job that these words of `train` describe, as its own process will read them."""
    flags = dict(train.make_context("train", list(words)).params)
    for name in ("dry_run", "placement", "as_object"):
        del flags[name]
    _, implied = rendezvous_from(flags)
    return resolved_from(flags.pop("program"), {**flags, **implied})


def _check_placement(placement: bool, dry_run: bool) -> None:
    if placement and not dry_run:
        raise RequestError(
            asked="--placement",
            found="no --dry-run",
            why="a training records by itself what each rank holds, after its first update",
            do="--dry-run --placement, or after the start: allranks show RUN --placement",
        )


def _print_plan(
    resolved: Resolved, rendezvous: Rendezvous, placement: bool, as_object: bool
) -> None:
    """What would run; with `placement` also what each rank would hold."""
    if placement and isinstance(find_place(resolved.job.place), AgentPlace):
        raise RequestError(
            asked=f"--placement --place {resolved.job.place}",
            found="more than this machine",
            why="what each rank holds is found by setting all of them up, here",
            do="the same with --place local: every rank holds the same there",
        )
    with plan_only(resolved, rendezvous) as (plan, server):
        data, shown = {**plan.to_data(), "sources": resolved.sources}, str(plan)
        if placement:
            data["placement"], text = load(PLACEMENT)(plan, server)
            shown += f"\n\n{text}"
    click.echo(as_json(data) if as_object else shown)
