"""`allranks check PROGRAM`: is the result that of one process? `-- COMMAND`: what is wrong?"""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json, write_whole
from allranks.cli.display.progress import say
from allranks.cli.options import (
    COMMON,
    Verb,
    job_options,
    option_groups,
    resolved_from,
    with_options,
)
from allranks.cli.run import SCRIPT_OPTIONS, RankOutput, command_watcher, request_from
from allranks.errors import (
    EXIT_DIFFERENCE_FOUND,
    EXIT_UNDECIDED,
    AllranksError,
    Interrupted,
    ProgramError,
    RequestError,
    Stopped,
)
from allranks.job.place import LOCAL
from allranks.launcher.places.base import NodeRequest
from allranks.launcher.scripts.plan import redacted_words
from allranks.launcher.scripts.run import run_command, run_dir_of
from allranks.launcher.scripts.torchrun import TorchrunFlags
from allranks.tools.check.against_single import (
    DEEP_STEPS,
    STEPS,
    of_first_steps,
    options_left_out,
)
from allranks.tools.check.check import checked_in_scratch
from allranks.tools.report.records import CHECK_RECORD
from allranks.tools.script_check.rules.facts import FACTS, watched_request
from allranks.tools.script_check.rules.watch import watched_in

MEANINGS = {
    "--ranks": "Ranks to check (default: 2 and 3).",
    "--steps": f"Steps to compare (default {STEPS}).",
}


class CheckCommand(Verb):
    """`check`, which is another command where a `--` says that a script follows."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **extra: Any
    ) -> click.Context:
        if "--" in args:
            return check_script.make_context(info_name, args, *more, **extra)
        return super().make_context(info_name, args, *more, **extra)


@click.command(cls=CheckCommand, groups=option_groups(), common=COMMON, meanings=MEANINGS)
@click.argument("program", required=False)
@click.option("--strategy", help="The strategy to check (default: the usual on many ranks).")
@click.option("--deep", is_flag=True, help=f"Compare {DEEP_STEPS} steps, not {STEPS}.")
@click.option("--keep-runs", type=click.Path(), help="Keep runs and traces there (default none).")
@job_options
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check(
    program: str | None, deep: bool, keep_runs: str | None, as_object: bool, **flags: Any
) -> None:
    """Compare PROGRAM on several ranks with one process; name the first difference and its cause.

    \b
    allranks check digits --strategy ddp --ranks 3
    allranks check --ranks 2 -- python train.py     (a script; help: check --help --)

    20 steps in float64 on 2 and on 3 ranks, then in the precision of the job. `cause:` was
    confirmed: undoing it makes the difference vanish; `looks like:` was not. An APPROXIMATE
    strategy is checked at the setting where it is exact; then its drift is measured.
    Exit codes: 0 equal, 5 a difference.
    """
    ranks_given = flags["job_file"] is not None or bool(flags["ranks"] or flags["nodes"])
    bounded = flags["steps"] is None
    options = {} if flags["job_file"] else options_left_out(program or "", flags, deep=deep)
    few = options.pop("steps", DEEP_STEPS if deep else STEPS)
    resolved = resolved_from(program, flags | options)
    resolved = of_first_steps(resolved, few if bounded else None)
    announce = (lambda text: None) if as_object else say
    verdict = checked_in_scratch(
        resolved, keep_runs, explicit=ranks_given, bounded=bounded, announce=announce
    )
    click.echo(str(verdict), err=as_object)
    data = as_json(verdict.to_data())
    if keep_runs is not None:
        write_whole(Path(keep_runs) / CHECK_RECORD, f"{data}\n".encode())
    if as_object:
        click.echo(data)
    if verdict.equal is False:
        sys.exit(EXIT_DIFFERENCE_FOUND)


@click.command(
    cls=Verb, context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] --"
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.option("--ranks", type=click.IntRange(min=1), default=2, help="Processes to start.")
@partial(with_options, SCRIPT_OPTIONS)
@click.option(
    "--warm", is_flag=True, help="Start the ranks from one process that has imported torch."
)
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check_script(words: tuple[str, ...], ranks: int, as_object: bool, **flags: Any) -> None:
    """Run COMMAND on several ranks, watch it, and name what silently changes its result.

    \b
    allranks check --ranks 2 -- python train.py --epochs 2

    Any script of torch, unchanged. Each finding has its line, what it does, and the fix.
    Exit codes: 0 nothing was found, 5 something was, 6 nothing was, but not all of the script was
    watched, 1 it failed.
    """
    flags |= {"roles": "", "shared_memory": False, "grace": None}
    flags["warm"] = "torch" if flags["warm"] else ""
    request = request_from(words, flags, TorchrunFlags(), NodeRequest(LOCAL, 1, ranks))
    request = watched_request(request, run_dir_of(request), os.environ)
    output = RankOutput(request.shown)
    failed: AllranksError | None = None
    try:
        run_command(request, watcher=command_watcher(output))
    except (ProgramError, Interrupted, Stopped) as error:  # findings up to then
        failed = error
    finally:
        say(output.close())
    try:
        watched = watched_in(Path(request.run_dir, FACTS))
    except RequestError:
        if failed is not None:
            raise failed from None
        raise
    click.echo(str(watched), err=as_object)
    if as_object:
        command = shlex.join(redacted_words(request.command))
        click.echo(as_json({"run_dir": request.run_dir, "command": command, **watched.to_data()}))
    else:
        say(f"run folder {request.run_dir}")
    if failed is not None:
        raise failed
    if watched.findings:
        sys.exit(EXIT_DIFFERENCE_FOUND)
    if not watched.decided:
        sys.exit(EXIT_UNDECIDED)
