"""`allranks check PROGRAM`: is the result that of one process? `-- COMMAND`: what is wrong?"""

from __future__ import annotations

import dataclasses
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
    EXIT_DONE,
    EXIT_UNDECIDED,
    AllranksError,
    Interrupted,
    ProgramError,
    RequestError,
    Stopped,
)
from allranks.job.place import LOCAL
from allranks.launcher.places import NodeRequest
from allranks.launcher.scripts.plan import CommandRequest, redacted_words
from allranks.launcher.scripts.run import CommandWatcher, run_dir_of, run_side_by_side
from allranks.launcher.scripts.torchrun import TorchrunFlags
from allranks.tools.check.against_single import DEEP_STEPS, STEPS, of_first_steps, options_left_out
from allranks.tools.check.check import checked_in_scratch
from allranks.tools.report.records import CHECK_RECORD
from allranks.tools.script_check.rules.against import (
    RecordedScript,
    StepComparison,
    search_script_operators,
)
from allranks.tools.script_check.rules.facts import FACTS, watched_request
from allranks.tools.script_check.rules.watch import watched_in

CHECKED, AGAINST = "checked ", "against "
GRACE_S = 5.0  # for one of two commands, when the other has failed
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
        if any(word.partition("=")[0] == "--against" for word in args):
            raise RequestError(
                asked="--against COMMAND",
                found="no `--` with a command behind it",
                why="two commands are compared, and the checked one stands behind `--`",
                do='allranks check --against "train.py --batch 64" -- train.py --batch 32',
            )
        return super().make_context(info_name, args, *more, **extra)


@click.command(cls=CheckCommand, groups=option_groups(), common=COMMON, meanings=MEANINGS)
@click.argument("program", required=False)
@click.option("--strategy", help="The strategy to check (default: the usual on many ranks).")
@click.option("--deep", is_flag=True, help=f"{DEEP_STEPS} steps; name the operator that differs.")
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
    allranks check --against one.py -- two.py       (two scripts, step by step)

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
        resolved, keep_runs, explicit=ranks_given, bounded=bounded, deep=deep, announce=announce
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
@click.option("--against", metavar="COMMAND", help="Compare with what this one computes.")
@click.option("--against-ranks", type=click.IntRange(min=1), help="Its processes (default 1).")
@click.option("--steps", type=click.IntRange(min=1), help=f"Steps to compare (default {STEPS}).")
@click.option("--deep", is_flag=True, help="Run both again; name the operator that differs.")
@partial(with_options, SCRIPT_OPTIONS)
@click.option(
    "--warm", is_flag=True, help="Start the ranks from one process that has imported torch."
)
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def check_script(
    words: tuple[str, ...], ranks: int, as_object: bool, deep: bool, **flags: Any
) -> None:
    """Run COMMAND on several ranks, watch it, and name what silently changes its result.

    \b
    allranks check --ranks 2 -- python train.py --epochs 2
    allranks check --against "train.py --batch 64" -- train.py --batch 32

    Any script of torch, unchanged. Each finding has its line, what it does, and the fix; with
    --against, the first difference of the two has its step, tensor and cause.
    Exit codes: 0 nothing was found, 5 something was, 6 nothing was, but not all of the script was
    watched, 1 it failed.
    """
    against, against_ranks, steps = (flags.pop(n) for n in ("against", "against_ranks", "steps"))
    if against is None and (against_ranks or steps or deep):
        raise RequestError(
            asked="--against-ranks, --steps or --deep",
            found="no --against",
            why="they say how a command is compared with another one",
            do='allranks check --against "train.py --batch 64" -- train.py --batch 32',
        )
    flags |= {"roles": "", "shared_memory": False, "grace": None if against is None else GRACE_S}
    flags["warm"] = "torch" if flags["warm"] else ""
    worlds = {"": (words, ranks)}
    if against is not None:
        worlds = {CHECKED: (words, ranks), AGAINST: (_split(against), against_ranks or 1)}
        steps = steps or STEPS
    requests = []
    for side, (command, count) in worlds.items():
        request = request_from(command, flags, TorchrunFlags(), NodeRequest(LOCAL, 1, count))
        run_dir = run_dir_of(request) + "-against" * (side == AGAINST)
        requests.append(watched_request(request, run_dir, os.environ, steps or 0))
    output = RankOutput(requests[0].shown)
    watchers = [command_watcher(output, side) for side in worlds]
    failed: AllranksError | None = None
    try:
        run_side_by_side([*zip(requests, watchers, strict=True)])
    except (ProgramError, Interrupted, Stopped) as error:  # findings up to then
        failed = error
    finally:
        say(output.close())
    if against is not None:
        sys.exit(_compared(requests, failed, as_object, deep=deep))
    _say_watched(requests[0], failed, as_object)


def _say_watched(request: CommandRequest, failed: AllranksError | None, as_object: bool) -> None:
    """Print the findings of a watched run, and exit with their code."""
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


def _compared(
    requests: list[CommandRequest], failed: AllranksError | None, as_object: bool, *, deep: bool
) -> int:
    """Print how the first steps of two commands compare; return the exit code."""
    if failed is not None:
        raise failed
    candidate, reference = (
        RecordedScript(Path(request.run_dir, FACTS), shlex.join(redacted_words(request.command)))
        for request in requests
    )
    comparison = StepComparison(reference, candidate)
    click.echo(str(comparison), err=as_object)
    first, operators = comparison.difference, None
    if deep and first is not None:
        say(f"both commands run again, for the operators of step {first.step}")
        operators = search_script_operators(comparison, requests, _run_again)
        click.echo(str(operators), err=as_object)
    if as_object:
        data = {**comparison.to_data(), "operators": operators and dataclasses.asdict(operators)}
        click.echo(as_json({"run_dir": requests[0].run_dir, **data}))
    return {True: EXIT_DONE, False: EXIT_DIFFERENCE_FOUND, None: EXIT_UNDECIDED}[comparison.equal]


def _run_again(requests: list[CommandRequest]) -> None:
    run_side_by_side([(request, CommandWatcher()) for request in requests])


def _split(command: str) -> tuple[str, ...]:
    try:
        words, fault = tuple(shlex.split(command)), "no command"
    except ValueError as error:
        words, fault = (), str(error)
    if words:
        return words
    raise RequestError(
        asked=f"--against {command!r}",
        found=fault,
        why="it is split into words as by a shell",
        do="give a command: --against \"train.py --name 'two words'\"",
    )
