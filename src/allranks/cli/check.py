"""`allranks check PROGRAM`: is the result that of one process? `-- COMMAND`: what is wrong?"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json, write_whole
from allranks.cli.display.progress import say
from allranks.cli.options import Duration, GroupedCommand, job_options, resolved_from
from allranks.cli.run import RankOutput, command_watcher, request_from
from allranks.errors import EXIT_DIFFERENCE_FOUND, ProgramError, RequestError
from allranks.job.place import LOCAL
from allranks.launcher.places.base import NodeRequest
from allranks.launcher.scripts.plan import redacted_words
from allranks.launcher.scripts.run import run_command, run_dir_of
from allranks.launcher.scripts.torchrun import TorchrunFlags
from allranks.tools.check.against_single import DEEP_STEPS, STEPS, options_left_out
from allranks.tools.check.check import checked_in_scratch
from allranks.tools.report.records import CHECK_RECORD
from allranks.tools.script_check.rules.facts import FACTS, watched_request
from allranks.tools.script_check.rules.watch import watched_in


class CheckCommand(GroupedCommand):
    """`check`, which is another command where a `--` says that a script follows."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **extra: Any
    ) -> click.Context:
        if "--" in args:
            return check_script.make_context(info_name, args, *more, **extra)
        return super().make_context(info_name, args, *more, **extra)


@click.command(cls=CheckCommand)
@click.argument("program", required=False)
@click.option("--strategy", help="The strategy to check (default: the engine's for many ranks).")
@click.option(
    "--deep", is_flag=True, help=f"Compare {DEEP_STEPS} steps in place of {STEPS} (or --steps N)."
)
@click.option("--keep-runs", type=click.Path(), help="Keep the runs and their traces here.")
@job_options
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check(
    program: str | None, deep: bool, keep_runs: str | None, as_object: bool, **flags: Any
) -> None:
    """Train PROGRAM and one process side by side, and tell the first difference, and its cause.

    In float64 on 2 and on 3 ranks, then in the precision of the job (--precision), over 20 steps,
    or 100 with --deep. `cause:` is said only if undoing it in what was recorded makes the
    difference vanish; else there is what it `looks like:`. Of a strategy that is approximate the
    setting at which it is exact is checked, and then it is measured how far it drifts as asked.
    Exit code 0: equal; 5: a difference. With `--` and a command it watches any script of torch,
    unchanged: `allranks check --help --` tells of that.

    \b
    allranks check digits --strategy ddp --ranks 3
    allranks check --ranks 2 -- python train.py
    """
    ranks_given = flags["job_file"] is not None or bool(flags["ranks"] or flags["nodes"])
    bounded = flags["steps"] is None
    if flags["job_file"] is None:
        flags |= options_left_out(program or "", flags, deep=deep)
    elif bounded:
        flags["steps"] = DEEP_STEPS if deep else STEPS
    resolved = resolved_from(program, flags)
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
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS] --",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.option("--ranks", type=click.IntRange(min=1), default=2, help="Processes (default 2).")
@click.option("--variables", default="", help="Frameworks whose variables are set, or all.")
@click.option(
    "--local-rank-argument",
    default="",
    help="Put the local rank behind the script: --local_rank or --local-rank.",
)
@click.option(
    "--warm", is_flag=True, help="Start the ranks from one process that has imported torch."
)
@click.option(
    "--hang-timeout",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds without any output that are a hang (default 0: never).",
)
@click.option("--time-limit", type=Duration(), help="Stop after 90, 30m or 1:30:00.")
@click.option("--show", default="", help="Ranks whose output is shown: 0,2, all or none.")
@click.option("--run-dir", default="", help="The run folder to make (default runs/SCRIPT-TIME).")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check_script(words: tuple[str, ...], ranks: int, as_object: bool, **flags: Any) -> None:
    """Run COMMAND on several ranks, watch it, and name what silently changes its result.

    Any script of torch, unchanged, as `allranks run` starts it. Each finding has its line, what it
    does, and the fix. Exit code 0: nothing was found; 5: something was; 1: the script failed.

    \b
    allranks check --ranks 2 -- python train.py --epochs 2
    """
    flags |= {"roles": "", "shared_memory": False, "grace": None}
    flags["warm"] = "torch" if flags["warm"] else ""
    request = request_from(words, flags, TorchrunFlags(), NodeRequest(LOCAL, 1, ranks))
    request = watched_request(request, run_dir_of(request), os.environ)
    output = RankOutput(request.shown)
    failed: ProgramError | None = None
    try:
        run_command(request, watcher=command_watcher(output))
    except ProgramError as error:
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
