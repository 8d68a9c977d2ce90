"""`allranks bench PROGRAM --strategy ddp --ranks 1,2`: how fast, with what certainty."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json, write_whole
from allranks.cli.display.say import say
from allranks.cli.options import resolved_from
from allranks.cli.train import train
from allranks.errors import Interrupted, ProgramError, RequestError
from allranks.job.job import Job
from allranks.job.units import format_bytes
from allranks.launcher.start import new_run_dir
from allranks.strategies.resolve import strategy_spec
from allranks.tools.bench.measuring import Found, Measured, measure
from allranks.tools.bench.plan import STRONG, WEAK, Combination, Plan, checked_plan
from allranks.tools.bench.results import machine_facts, rows_of, to_data
from allranks.tools.bench.tables import proposal, table

RECORD, PAGE = "bench.json", "proposal.md"
TRAIN_ONLY_OPTIONS = ("dry_run", "placement", "as_object")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("program")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAIN OPTIONS]")
@click.option("--strategy", multiple=True, help="A strategy to measure (default ddp); repeat it.")
@click.option("--ranks", default="1,2", help="Numbers of ranks, by comma (default 1,2).")
@click.option("--steps", type=click.IntRange(min=2), default=60, help="Steps that count.")
@click.option("--warm-up", type=click.IntRange(min=1), default=20, help="Steps before them.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Runs of each (default 5).")
@click.option("--scaling", type=click.Choice([STRONG, WEAK]), default=STRONG, help="Whose batch.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Of a batch (weak: of a rank).")
@click.option("--page", type=click.Choice(["proposal"]), help="Write this page, too.")
@click.option("--run-dir", help="The folder of the bench (default runs/PROGRAM-bench-TIME).")
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def bench(
    program: str, words: tuple[str, ...], as_object: bool, dry_run: bool, **more: Any
) -> None:
    """Measure how fast PROGRAM trains, for each strategy on each number of ranks.

    Every combination is a job of its own, run once in each turn, so that what disturbs the machine
    disturbs all of them. Each rank has as many threads in all of them. What stands behind `--` goes
    to every job, as `allranks train` takes it.

    \b
    allranks bench digits --strategy ddp --strategy zero1 --ranks 1,2
    allranks bench digits --ranks 1,2 --scaling weak --batch-size 64 --page proposal
    allranks bench digits --ranks 1,2 -- --precision fp64
    """
    plan, jobs, refused = _plan(program, words, more)
    folder = Path(more["run_dir"] or new_run_dir(f"{Path(program).stem}-bench")).absolute()
    if dry_run:
        _print_plan(plan, refused, folder, as_object)
        return
    machine = machine_facts()
    if folder.exists() and any(folder.iterdir()):
        raise _refused(f"--run-dir {folder}", "a folder with something in it", "a new folder")
    say(f"{_in_words(machine)}; {jobs} jobs")
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(plan, refused, folder, _tell)
    data = to_data(plan, found, machine)
    write_whole(folder / RECORD, (as_json(data) + "\n").encode())
    rows = rows_of(found)
    click.echo(table(rows), err=as_object)
    if more["page"]:
        page = proposal(plan, rows, _in_words(machine))
        write_whole(folder / PAGE, page.encode())
        click.echo(f"page {folder / PAGE}", err=as_object)
    if as_object:
        click.echo(as_json({"run_dir": str(folder), **data}))
    else:
        say(f"record {folder / RECORD}")
    _conclude(plan, found)


def _plan(
    program: str, words: Sequence[str], more: dict[str, Any]
) -> tuple[Plan, int, dict[Combination, str]]:
    """What is to be measured, how many jobs that are, and what cannot be, with the reason."""
    strategies, ranks = more["strategy"] or ("ddp",), _numbers(more["ranks"])
    if not any(word.partition("=")[0] == "--threads" for word in words):
        each = max(1, len(os.sched_getaffinity(0)) // max(ranks))
        words = (*words, "--threads", str(each))
    every = tuple(Combination(strategy, n) for strategy in strategies for n in ranks)
    plan = Plan(
        program,
        every,
        more["steps"],
        more["warm_up"],
        more["repeats"],
        more["scaling"],
        more["batch_size"] or 0,
        tuple(words),
    )
    plan, refused = checked_plan(plan, strategies), dict[Combination, str]()
    problem: RequestError | None = None
    for one in every:
        try:
            _check(one, _job(plan.words_of(one)))
        except RequestError as error:
            refused[one], problem = f"refused: {error.found}", error
    if problem is not None and len(refused) == len(every):
        raise problem
    return plan, (len(every) - len(refused)) * plan.repeats, refused


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise _refused(f"--ranks {text}", "no different numbers of 1 or more", "--ranks 1,2,4")
    return found


def _job(words: Sequence[str]) -> Job:
    """The job that these words describe, as its own process will read them."""
    try:
        asked = train.make_context("train", list(words)).params
    except click.UsageError as error:
        raise _refused(
            f"train {' '.join(words)}", error.format_message(), "allranks train --help"
        ) from error
    flags = {name: value for name, value in asked.items() if name not in TRAIN_ONLY_OPTIONS}
    return resolved_from(flags.pop("program"), flags).job


def _check(one: Combination, job: Job) -> None:
    """Raise `RequestError` for ranks that train apart: no one of them counts the samples of all."""
    if not strategy_spec(job.strategy, job.ranks).card.agreement.is_one_training:
        raise _refused(
            f"--strategy {one.strategy}",
            "ranks that train apart",
            "a strategy whose ranks make one training",
        )


def _refused(asked: str, found: str, do: str) -> RequestError:
    return RequestError(
        asked=asked, found=found, why="a bench measures whole trainings side by side", do=do
    )


def _in_words(machine: dict[str, Any]) -> str:
    """The ceiling, before any figure."""
    return (
        f"{machine['cores']} processors, {format_bytes(machine['memory_bytes'])}, "
        f"a load of {machine['load_1min']:.1f} before"
    )


def _tell(combination: Combination, turn: int, measured: Measured | str) -> None:
    said = measured if isinstance(measured, str) else f"{measured.steps.speed:,.0f} samples/s"
    say(f"turn {turn + 1}  {combination.strategy} on {combination.ranks}: {said}")


def _print_plan(plan: Plan, refused: dict[Combination, str], folder: Path, as_object: bool) -> None:
    jobs: list[dict[str, Any]] = [
        {"strategy": one.strategy, "ranks": one.ranks, "words": plan.words_of(one)}
        | ({"refused": refused[one]} if one in refused else {})
        for one in plan.combinations
    ]
    if as_object:
        click.echo(as_json({"run_dir": str(folder), "repeats": plan.repeats, "jobs": jobs}))
        return
    for job in jobs:
        why = job.get("refused")
        click.echo(f"allranks train {' '.join(job['words'])}" + (f"   # {why}" if why else ""))
    click.echo(f"{plan.repeats} turns, in {folder}")


def _conclude(plan: Plan, found: Sequence[Found]) -> None:
    """Raise how it ended, unless each combination that is possible was measured in all turns."""
    failed = [one for one in found if one.problem and not one.problem.startswith("refused")]
    if failed:
        first = failed[0]
        name = f"{first.combination.strategy} on {first.combination.ranks}"
        raise ProgramError(
            f"{len(failed)} of {len(found)} were not measured: {name}: {first.problem}"
        )
    if any(not one.problem and len(one.runs) < plan.repeats for one in found):
        raise Interrupted("interrupted; the record has what was measured until then")
