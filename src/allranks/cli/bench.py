"""`allranks bench PROGRAM --strategy ddp --ranks 1,2`: how fast, with what certainty."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from allranks.checkpoint.files import as_json, write_whole
from allranks.cli.display.progress import DUMB_TERMINALS, say
from allranks.cli.options import Verb, typed_options
from allranks.cli.run import request_from
from allranks.cli.train import resolved_words
from allranks.errors import Interrupted, ProgramError, RequestError, printable
from allranks.job.job import Job
from allranks.job.place import LOCAL
from allranks.job.program import is_script
from allranks.job.units import format_bytes
from allranks.launcher.places import NodeRequest
from allranks.launcher.scripts.plan import redacted_words
from allranks.launcher.scripts.run import name_of
from allranks.launcher.scripts.torchrun import TorchrunFlags
from allranks.launcher.start import look_at_program, new_run_dir
from allranks.strategies.resolve import strategy_spec
from allranks.tools.bench.figure import sweep_figure
from allranks.tools.bench.machine import all_reduce_bytes_per_s, in_words, machine_facts
from allranks.tools.bench.measuring import BenchWatcher, RunSet, measure
from allranks.tools.bench.peers import PEERS, check_job, check_peers, refused_task, script_of
from allranks.tools.bench.plan import (
    STRONG,
    WEAK,
    BenchPlan,
    Combination,
    checked_plan,
    swept,
    with_shares,
)
from allranks.tools.bench.reading import Measured, interval
from allranks.tools.bench.results import BenchRow, rows_of, scaling_of, to_data
from allranks.tools.bench.scripts import check_options
from allranks.tools.bench.tables import how_timed, proposal, table, with_reach
from allranks.tools.report.records import BENCH_RECORD

PAGE = "proposal.md"
STEPS = 60


class BenchCommand(Verb):
    """`bench`, which measures a script where no PROGRAM stands before `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            before, _, _ = self.make_parser(ctx).parse_args(args[: args.index("--")])
            ctx.meta[SCRIPT] = not isinstance(before.get("program"), str)
        return super().parse_args(ctx, args)


SCRIPT = "allranks.bench.script"


@click.command(cls=BenchCommand)
@click.argument("program")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAIN OPTIONS]")
@click.option(
    "--strategy", multiple=True, help="Strategy to measure; may be repeated (default ddp)."
)
@click.option(
    "--share", multiple=True, help="Shares to measure: even, auto or 5,2,1; may be repeated."
)
@click.option("--ranks", default="1,2", help="Numbers of ranks to measure.")
@click.option(
    "--sweep", default="", help="Measure each value of an option of the strategies, as split=1,2,4."
)
@click.option("--peers", default="", help=f"Measure these too: {', '.join(PEERS)} (default: none).")
@click.option(
    "--peer-limit",
    type=click.FloatRange(min=1),
    default=1800.0,
    help="Longest run of a peer or a script.",
)
@click.option(
    "--until", default="", help="Measure the time until accuracy=0.97, not that of steps."
)
@click.option("--steps", type=click.IntRange(min=2), help=f"Steps to time (default {STEPS}).")
@click.option(
    "--warm-up", type=click.IntRange(min=1), default=20, help="Steps before those, not timed."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Runs of each combination.")
@click.option(
    "--scaling",
    type=click.Choice([STRONG, WEAK]),
    default=STRONG,
    help="strong: same batch on any ranks; weak: same batch per rank.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Samples of a batch (default: the task's); weak needs it, and takes it per rank.",
)
@click.option(
    "--page", type=click.Choice(["proposal"]), help=f"Also write {PAGE}, a scaling study."
)
@click.option("--run-dir", help="The folder of the bench (default runs/PROGRAM-bench-TIME).")
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
@click.pass_context
def bench(
    ctx: click.Context, /, program: str, words: tuple[str, ...], as_object: bool, **more: Any
) -> None:
    """Measure how fast PROGRAM trains, for each strategy on each number of ranks.

    \b
    allranks bench --ranks 1,2,4 -- python train.py
    allranks bench digits --strategy ddp --strategy zero1 --ranks 1,2
    allranks bench digits --ranks 1,2 --scaling weak --batch-size 64 --page proposal
    allranks bench digits --ranks 2 --peers hand,accelerate
    allranks bench digits --until accuracy=0.95 -- --eval-every 5
    allranks bench digits --ranks 1 --strategy model-parallel:parts=2 --sweep split=1,2,4
    allranks bench digits --ranks 2 --share even --share auto
    allranks bench digits --ranks 1,2 -- --precision fp64

    Every combination is a job of its own. They take turns, --repeats times, so that what disturbs
    the machine disturbs all alike. Ranks have the same number of threads in all of them. Words
    behind `--` are options of `allranks train`, for every job. Without PROGRAM they are a command:
    a script that runs unchanged, whose own steps are timed.
    """
    is_script = ctx.meta.get(SCRIPT)
    check_options(typed_options(ctx) if is_script else ())
    planned = _plan_of_script((program, *words), more) if is_script else None
    plan, jobs, refused = (planned, {}, {}) if planned else _plan(program, words, more)
    runs = sum(c not in refused for c in plan.combinations) * plan.repeats
    folder = Path(more["run_dir"] or new_run_dir(f"{Path(plan.program).stem}-bench")).absolute()
    if not more["dry_run"] and folder.exists() and any(folder.iterdir()):
        raise _refused(f"--run-dir {folder}", "a folder with something in it", "a new folder")
    look_at_program(list(jobs.values())[:1])
    if more["dry_run"]:
        _print_plan(plan, refused, folder, as_object)
        return
    machine = machine_facts()
    if jobs:
        largest = max(jobs.values(), key=lambda job: job.ranks)
        machine["all_reduce_bytes_per_s"] = all_reduce_bytes_per_s(largest)
    say(f"{in_words(machine)}; {runs} jobs")
    folder.mkdir(parents=True, exist_ok=True)
    progress = BenchTable(plan, refused)
    with progress.shown():
        measured = measure(plan, refused, folder, jobs, progress.watcher())
    rows = rows_of(measured, plan.until)
    plan = dataclasses.replace(plan, scaling=scaling_of(rows)) if plan.command else plan
    data = to_data(plan, measured, machine)
    write_whole(folder / BENCH_RECORD, (as_json(data) + "\n").encode())
    click.echo(table(rows), err=as_object)
    if plan.command and any(row.speed for row in rows):
        say(how_timed(plan, rows))
    for kind, name, text in _further(plan, rows, more["page"], in_words(machine)):
        write_whole(folder / name, text.encode())
        click.echo(f"{kind} {folder / name}", err=as_object)
    if as_object:
        click.echo(as_json({"run_dir": str(folder), **data}))
    else:
        say(f"record {folder / BENCH_RECORD}")
    _conclude(plan, measured)


def _further(
    plan: BenchPlan, rows: Sequence[BenchRow], page: str, machine: str
) -> Iterator[tuple[str, str, str]]:
    """What is written beside the record: what it is, its name, its text."""
    if page:
        yield "page", PAGE, proposal(plan, rows, machine)
    figure = sweep_figure(plan, rows) if plan.swept else None
    if figure is not None:
        yield "figure", f"{plan.swept}.svg", figure


def _plan(
    program: str, words: Sequence[str], more: dict[str, Any]
) -> tuple[BenchPlan, dict[Combination, Job], dict[Combination, str]]:
    """What is to be measured, the jobs that are, and what cannot be, with the reason."""
    _refuse_script(program)
    strategies, ranks = list(more["strategy"] or ("ddp",)), _numbers(more["ranks"])
    peers = tuple(filter(None, more["peers"].split(",")))
    check_peers(peers)
    strategies, option = swept(strategies, more["sweep"]) if more["sweep"] else (strategies, "")
    strategies = with_shares(strategies, more["share"])
    every = [Combination(strategy, n) for strategy in strategies for n in ranks]
    every += [Combination(peer, n, is_peer=True) for peer in peers for n in ranks]
    plan = BenchPlan(
        program,
        tuple(every),
        more["steps"] or (0 if more["until"] else STEPS),
        more["warm_up"],
        more["repeats"],
        more["scaling"],
        more["batch_size"] or 0,
        _words(words, max(ranks), more["until"]),
        more["until"],
        option,
        more["peer_limit"],
    )
    plan = checked_plan(plan, [*strategies, *peers])
    refused, jobs, problem = dict[Combination, str](), dict[Combination, Job](), None
    for combination in every:
        try:
            job = _job(plan.words_of(combination))
            _check(combination, job)
        except RequestError as error:
            refused[combination], problem = f"refused: {error.found}", problem or error
        else:
            jobs[combination] = job
    _refuse_task(jobs, refused)
    if problem is not None and not jobs:
        raise problem
    return plan, jobs, refused


def _plan_of_script(words: tuple[str, ...], more: dict[str, Any]) -> BenchPlan:
    """The plan for a command that `allranks run` starts; raises `RequestError` if it cannot."""
    flags = {"roles": "", "warm": "", "shared_memory": False, "variables": "", "grace": None}
    flags |= {"local_rank_argument": "", "hang_timeout": 0.0, "time_limit": None, "show": ""}
    numbers = _numbers(more["ranks"])
    wanted = NodeRequest(LOCAL, 1, max(numbers))
    request = request_from(words, {**flags, "run_dir": ""}, TorchrunFlags(), wanted)
    name = name_of(request.command)
    script = next((Path(word).name for word in request.command if word.endswith(".py")), name)
    every = tuple(Combination(script, n) for n in numbers)
    return BenchPlan(
        script,
        every,
        more["steps"] or STEPS,
        more["warm_up"],
        more["repeats"],
        peer_limit_s=more["peer_limit"],
        command=request.command,
    )


def _refuse_script(program: str) -> None:
    """Raise `RequestError` for a file that holds no task, before it is imported, which runs it."""
    path = Path(program.partition(":")[0])
    if path.suffix == ".py" and is_script(path):
        raise RequestError(
            asked=f"bench {program}",
            found="a script: no class in it is a task",
            why="without `--` a task is measured; a script is started as a command, unchanged",
            do=f"allranks bench --ranks 1,2 -- python {program}",
        )


def _words(words: Sequence[str], ranks: int, until: str) -> tuple[str, ...]:
    """The words for every job: as many threads for each rank, and with `until` evaluations."""
    flags = {word.partition("=")[0] for word in words}
    more = list(words)
    if "--threads" not in flags:
        more += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // ranks))]
    if until and "--eval-every" not in flags:
        more += ["--eval-every", "epoch"]
    return tuple(more)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise _refused(f"--ranks {text}", "no different numbers of 1 or more", "--ranks 1,2,4")
    return numbers


def _job(words: Sequence[str]) -> Job:
    """The job that these words describe, as its own process will read them."""
    try:
        return resolved_words(words).job
    except click.UsageError as error:
        raise _refused(
            f"train {' '.join(redacted_words(words))}",
            error.format_message(),
            "allranks train --help",
        ) from error


def _check(combination: Combination, job: Job) -> None:
    """Raise `RequestError` for ranks that train apart: no one of them counts the samples of all.

    And for what a peer does not have.
    """
    if combination.is_peer:
        check_job(combination.strategy, job)
        return
    if not strategy_spec(job.strategy, job.ranks).card.agreement.is_one_training:
        raise _refused(
            f"--strategy {combination.strategy}",
            "ranks that train apart",
            "a strategy whose ranks make one training",
        )


def _refuse_task(jobs: dict[Combination, Job], refused: dict[Combination, str]) -> None:
    """Move the peers from `jobs` to `refused` if the task asks for what no peer does."""
    peers = [peer for peer in jobs if peer.is_peer]
    why = refused_task(jobs[peers[0]]) if peers else ""
    for peer in peers if why else ():
        del jobs[peer]
        refused[peer] = f"refused: {why}"


def _refused(asked: str, found: str, do: str) -> RequestError:
    return RequestError(
        asked=asked, found=found, why="a bench measures whole trainings side by side", do=do
    )


def _print_plan(
    plan: BenchPlan, refused: dict[Combination, str], folder: Path, as_object: bool
) -> None:
    if plan.command and not as_object:
        for c in plan.combinations:
            words = redacted_words(plan.command)
            click.echo(f"allranks run --ranks {c.ranks} -- {shlex.join(words)}")
        click.echo(f"{plan.repeats} turns, in {folder}")
        return
    jobs: list[dict[str, Any]] = [
        {
            "strategy": c.strategy,
            "ranks": c.ranks,
            "words": redacted_words(plan.command or plan.words_of(c)),
        }
        | ({"peer": True} if c.is_peer else {})
        | ({"refused": refused[c]} if c in refused else {})
        for c in plan.combinations
    ]
    if as_object:
        click.echo(as_json({"run_dir": str(folder), "repeats": plan.repeats, "jobs": jobs}))
        return
    for job in jobs:
        why = job.get("refused")
        if "peer" in job and not why:
            why = f"this job, by `allranks run -- {script_of(job['strategy'])}`"
        click.echo(f"allranks train {' '.join(job['words'])}" + (f"   # {why}" if why else ""))
    click.echo(f"{plan.repeats} turns, in {folder}")


def _conclude(plan: BenchPlan, measured: Sequence[RunSet]) -> None:
    """Raise how it ended, unless each combination that is possible was measured in all turns."""
    failed = [row for row in measured if row.problem and not row.problem.startswith("refused")]
    if failed:
        first = failed[0]
        name = f"{first.combination.strategy} on {first.combination.ranks}"
        raise ProgramError(
            f"{len(failed)} of {len(measured)} were not measured: {name}: {first.problem}"
        )
    if any(not row.problem and len(row.runs) < plan.repeats for row in measured):
        raise Interrupted("interrupted; the record has what was measured until then")


# --- table ---------------------------------------------------------------------------------------
# The table of a bench while it runs, drawn over itself on a terminal; lines where none is.


EVERY_S = 0.5


class BenchTable:
    """What is known so far, a line for each combination."""

    def __init__(self, plan: BenchPlan, refused: dict[Combination, str]) -> None:
        self.plan, self.refused = plan, refused
        self.speeds: dict[Combination, list[float]] = defaultdict(list)
        self.last: dict[Combination, Measured] = {}
        self.problems = dict(refused)
        self.now: tuple[Combination, int] | None = None
        self._since = time.monotonic()
        self._next = 0.0
        self._live: Live | None = None

    def shown(self) -> AbstractContextManager[Any]:
        """Within, it is drawn on standard error, if that is a terminal that can be drawn on."""
        if not sys.stderr.isatty() or os.environ.get("TERM", "") in DUMB_TERMINALS:
            return nullcontext()
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, get_renderable=self.drawn)
        return self._live

    def watcher(self) -> BenchWatcher:
        """What the measuring tells it."""
        return BenchWatcher(self._began, self._ended, self._tick)

    def _began(self, combination: Combination, turn: int) -> None:
        self.now, self._since, self._next = (combination, turn), time.monotonic(), 0.0
        self._tick()

    def _ended(self, combination: Combination, turn: int, measured: Measured | str) -> None:
        if isinstance(measured, str):
            self.problems[combination] = measured
            text = measured
        else:
            self.speeds[combination].append(measured.steps.speed)
            self.last[combination] = measured
            text = f"{measured.steps.speed:,.0f} {measured.unit}"
        if self._live is None:
            say(f"turn {turn + 1}  {combination.strategy} on {combination.ranks}: {text}")
        self._next = 0.0
        self._tick()

    def _tick(self) -> None:
        if self._live is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self._live.refresh()

    def drawn(self) -> Table:
        """The table as it is now."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        unit = next((last.unit for last in self.last.values()), "samples/s")
        subject = "script" if self.plan.command else "strategy"
        for name in ("", subject, "ranks", "turns", unit, "exchange", "memory"):
            right = name not in ("", subject)
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for combination in self.plan.combinations:
            table.add_row(*self._cells(combination))
        return table

    def _cells(self, combination: Combination) -> Sequence[str]:
        name = printable(combination.strategy) + (" (peer)" if combination.is_peer else "")
        speeds, last = self.speeds[combination], self.last.get(combination)
        runs = self.now is not None and self.now[0] == combination
        seconds = f"{time.monotonic() - self._since:.0f} s" if runs else ""
        first = (seconds, name, str(combination.ranks), f"{len(speeds)}/{self.plan.repeats}")
        if last is None:
            return (*first, printable(self.problems.get(combination, ""))[:40], "", "")
        exchange = last.shares.get("exchange")
        return (
            *first,
            with_reach(interval(speeds), 0),
            "" if exchange is None else f"{exchange:.0%}",
            "" if last.peak_bytes is None else format_bytes(last.peak_bytes),
        )
