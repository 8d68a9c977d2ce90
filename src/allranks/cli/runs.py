"""`allranks runs`, `show RUN`: what jobs have left behind; `scale` and `join` while they run.

`replay`, `bisect`, `certify` and `verify` make steps of a run again.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from allranks.catalog import load
from allranks.checkpoint.files import as_json
from allranks.cli.display.following import anomalies_in, scaled_in_words
from allranks.cli.display.placement import as_data, table
from allranks.cli.display.progress import in_sentences
from allranks.cli.options import Verb
from allranks.errors import (
    EXIT_DIFFERENCE_FOUND,
    Interrupted,
    ProgramError,
    RequestError,
    Stopped,
    printable,
)
from allranks.job.job import Job
from allranks.job.limits import elastic_range
from allranks.job.place import read_placements
from allranks.job.resume import how_to_resume
from allranks.job.run_folder import check_is_run, is_in_use, read_events, read_rows
from allranks.job.scaling import ANSWERS, READ, Bounds, ScaleRequest, post, withdraw
from allranks.job.units import format_bytes
from allranks.strategies.resolve import strategy_spec
from allranks.tools import verify as verification
from allranks.tools.certificate import certify as certificate_of
from allranks.tools.replay import ReplayRequest
from allranks.tools.replay import replay as replay_step
from allranks.tools.report.records import ENDS, outcome_of, read_job, read_watched
from allranks.tools.report.tables import COMMAND_DEFAULTS, computed_again
from allranks.training.record.phases import held_in

BISECT = "allranks.tools.bisect:bisect"
MOST_NOTES = 10
HEADING_FIELDS = ("schema", "kind", "program", "processes", "run_dir")


@click.command(cls=Verb)
@click.argument("folder", default="runs")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def runs(folder: str, as_object: bool) -> None:
    """List the run folders in FOLDER (default: runs), the newest first."""
    paths = sorted(Path(folder).glob("*/job.toml"), key=lambda path: -path.stat().st_mtime)
    rows = [_row(path.parent) for path in paths]
    if as_object:
        click.echo(as_json(rows))
        return
    width = max((len(row["run_dir"]) for row in rows), default=0)
    for row in rows:
        summary = row["summary"] or {}
        metrics = "  ".join(f"{n} {float(v):.4f}" for n, v in summary.get("eval", {}).items())
        line = f"{row['run_dir']:<{width}}  {row['state']:<11} {_name_of(row)}  {metrics}"
        click.echo(printable(line.rstrip()))
    if not rows:
        click.echo(printable(f"no run folder in {folder}"), err=True)


@click.command(cls=Verb)
@click.argument("run")
@click.option("--placement", is_flag=True, help="What each rank holds on which device.")
@click.option("--job", "whole_job", is_flag=True, help="Its job file too, with every default.")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def show(run: str, placement: bool, whole_job: bool, as_object: bool) -> None:
    """Show one run: its state, its result or its first fault, and the values that were set."""
    path = Path(run)
    check_is_run(path, f"show {run}")
    job = read_job(path)
    if placement:
        _print_placement(path, job, as_object)
        return
    row = _row(path)
    watched = read_watched(path)
    if as_object:
        findings = {} if watched is None else watched.to_data()
        click.echo(as_json({**row, **findings, "job": job}))
        return
    click.echo(printable(f"{_name_of(row)}: {row['state']}"))
    if watched is not None:
        click.echo("\n".join(printable(line) for line in str(watched).splitlines()))
    if row["summary"]:
        click.echo(in_sentences(row["summary"]))
    if row["memory"]:
        click.echo(_memory_in_words(row["memory"]))
    for line in _computed_again(path, row["summary"] or {}):
        click.echo(printable(line))
    if row["fault"]:
        click.echo("\n".join(printable(line) for line in row["fault"].splitlines()))
    if row["state"] not in ("done", "running") and (again := how_to_resume(path)):
        click.echo(printable(again))
    lines = [*_went_wrong(path), "", *_asked(job, run, with_hint=not whole_job)]
    if whole_job:
        lines += ["", *(path / "job.toml").read_text().splitlines()]
    click.echo("\n".join(printable(line) for line in lines))


def _memory_in_words(memory: dict[str, dict[str, int | None]]) -> str:
    """The largest memory of a process, and of a device, with its rank."""
    texts = []
    for kind, name in (("host_bytes", "a process"), ("device_bytes", "a device")):
        known = [(use[kind] or 0, rank) for rank, use in memory.items() if use[kind] is not None]
        if known:
            most, rank = max(known)
            texts.append(f"{name} held {format_bytes(most)} at most (rank {rank})")
    return "memory     " + ("; ".join(texts) or "unknown")


def _computed_again(path: Path, summary: dict[str, Any]) -> list[str]:
    """One line each of digests, audits and the newest replay."""
    newest = {row[0]: row for row in computed_again(path, (), summary).rows}
    return [
        f"{name:<10} {result}" + (f" (step {steps} {ranks}".rstrip() + ")" if steps else "")
        for name, steps, ranks, result in newest.values()
    ]


def _went_wrong(path: Path) -> list[str]:
    """Notes about problems during the run, the first `MOST_NOTES` in full."""
    problems = [
        problem if rank is None else f"rank {rank}: {problem}"
        for event in read_events(path)
        for rank, problem in anomalies_in(event)
    ]
    lines = [f"note: {line}" for line in problems[:MOST_NOTES]]
    if len(problems) > MOST_NOTES:
        lines.append(f"note: and {len(problems) - MOST_NOTES} more: see {path / 'events*.jsonl'}")
    return lines


def _asked(job: dict[str, Any], run: str, with_hint: bool) -> list[str]:
    """Every value that is not a default, with its source."""
    sources = job.get("source", {})
    task = {f"task.{name}": value for name, value in job.get("task", {}).items()}
    rows = []
    for name, value in {**job, **task}.items():
        if isinstance(value, dict) or name in HEADING_FIELDS or value == job["program"]:
            continue
        default = COMMAND_DEFAULTS.get(name, "") if "kind" in job else None
        source = sources.get(name, "default" if value == default or "kind" not in job else "")
        if source != "default":
            rows.append((name, str(value), source))
    width, broad = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    lines = [
        f"  {name:<{width}}  {value:<{broad}}  {source}".rstrip() for name, value, source in rows
    ]
    hint = f"the whole job: allranks show --job {shlex.quote(run)}"
    if with_hint:
        lines.append(f"  the rest has its default; {hint}" if lines else f"  only defaults; {hint}")
    return ["values that were set", *lines]


def _print_placement(path: Path, job: dict[str, Any], as_object: bool) -> None:
    placements = read_placements(path, int(job["ranks"]))
    if not placements:
        raise RequestError(
            asked=f"show {path} --placement",
            found="no rank has said what it holds",
            why="ranks record it after their first update",
            do="wait for that, or ask beforehand: allranks train PROGRAM … --dry-run --placement",
        )
    mesh = strategy_spec(job["strategy"], int(job["ranks"])).mesh
    if as_object:
        click.echo(as_json({"run_dir": str(path), "placement": as_data(placements, mesh)}))
    else:
        click.echo(table(placements, mesh))


def _row(path: Path) -> dict[str, Any]:
    """State, result and first fault of one run, from its job and its events."""
    try:
        job = read_job(path)
    except RequestError:
        nothing = dict.fromkeys(("program", "ranks", "members", "summary", "fault", "memory"))
        return {"run_dir": str(path), "state": "unreadable", **nothing}
    is_running = is_in_use(path)
    events = read_events(path)
    outcome = outcome_of(path, events, is_running)
    return {
        "run_dir": str(path),
        "state": outcome.state,
        "program": job["program"],
        "ranks": job["ranks"],
        "members": _members(events),
        "summary": outcome.summary,
        "fault": outcome.fault,
        "memory": {str(rank): use.to_data() for rank, use in held_in(events).items()},
    }


def _members(events: list[dict[str, Any]]) -> list[int] | None:
    """The ranks that trained last, if ranks were lost, joined or left since the last start."""
    members = None
    for event in events:
        if event["event"] in ("attempt", "group"):
            members = event.get("members")
    return members


def _name_of(row: dict[str, Any]) -> str:
    """`mytask.py × 4, then 3`: the ranks at the start, and of an elastic job those that go on."""
    name, size = f"{row['program']} × {row['ranks']}", len(row["members"] or ())
    return f"{name}, then {size}" if size not in (0, row["ranks"]) else name


# --- scale ---------------------------------------------------------------------------------------
# More or fewer ranks for a job that runs: a request in its folder, which its launcher answers.


NOTICE_S = 10.0  # for a launcher to read a request; it looks ten times a second
POLL_S = 0.1


@click.command(cls=Verb)
@click.argument("run")
@click.option("--ranks", type=click.IntRange(1), metavar="M", help="So many train then.")
@click.option("--leave", type=click.IntRange(0), multiple=True, help="Rank N leaves; repeatable.")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def scale(run: str, ranks: int | None, leave: tuple[int, ...], as_object: bool) -> None:
    """Let --ranks M ranks train the job in RUN from now on, or let some --leave.

    The job must have been started with --elastic MIN:MAX. New ranks load the program while the
    others train, and receive the weights at the boundary of a step. Nothing starts again, and the
    result does not change. Returns when the new ranks train, and those that leave have ended.
    """
    if (ranks is None) == (not leave):
        raise RequestError(
            asked=f"scale {run}",
            found="both --ranks and --leave" if ranks else "neither --ranks nor --leave",
            why="a request says how many ranks are to train, or which are to leave",
            do=f"allranks scale {run} --ranks 4, or allranks scale {run} --leave 2",
        )
    _print_answer(_answer(Path(run), ScaleRequest.new(ranks=ranks or 0, leave=leave)), as_object)


@click.command(cls=Verb)
@click.argument("run")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def join(run: str, as_object: bool) -> None:
    """Let one more rank of this machine train the job in RUN: see `allranks scale`."""
    _print_answer(_answer(Path(run), ScaleRequest.new(join=1)), as_object)


def _print_answer(answer: dict[str, Any], as_object: bool) -> None:
    click.echo(as_json(answer) if as_object else printable(scaled_in_words(answer)))


def _answer(run: Path, request: ScaleRequest) -> dict[str, Any]:
    """The event `scaled` that answers the request; raises the error of any other answer."""
    _check(run, request)
    post(run, request)
    try:
        answer = _wait(run, request)
    except BaseException:
        withdraw(run, request)
        raise
    if "request" in answer:
        raise RequestError.from_data(answer["request"])
    if "report" in answer:
        raise ProgramError(f"{request}: {answer['report']}")
    if answer["ranks"] != answer["wanted"]:
        raise ProgramError(f"{request}: {scaled_in_words(answer)}")
    return answer


def _check(run: Path, request: ScaleRequest) -> None:
    """Raise `RequestError` for what can be known without the launcher of the run."""
    check_is_run(run, f"{request} {run}")
    if (state := _state(run)) in ENDS and not is_in_use(run):
        resumes = state != "done" and how_to_resume(run)
        raise RequestError(
            asked=f"{request} {run}",
            found=f"a run that is over: {state}",
            why="ranks join and leave while others train",
            do=f"resume it on M ranks: allranks train --run-dir {run} --ranks M"
            if resumes
            else "start another job with --elastic MIN:MAX",
        )
    elastic = read_job(run).get("elastic", "")
    if not elastic:
        raise RequestError(
            asked=f"{request} {run}",
            found="a job without --elastic",
            why="its ranks form one group for good, and memory is laid out for them alone",
            do=f"stop it (Ctrl-C), and resume it: allranks train --run-dir {run} --elastic 1:8",
        )
    if request.ranks:
        request.size_after((), Bounds(*elastic_range(Job(elastic=elastic))))


def _state(run: Path) -> str:
    """The name of the last event of the launcher."""
    names = [row["event"] for row in read_rows(run / "events.jsonl")]
    return names[-1] if names else ""


def _wait(run: Path, request: ScaleRequest) -> dict[str, Any]:
    """The answer to a request, once it is there; raises if none will come."""
    posted_at, was_in_use = time.monotonic(), is_in_use(run)
    while True:
        is_over = was_in_use and not is_in_use(run)
        rows = [row for row in read_rows(run / "events.jsonl") if "number" in row]
        names = {row["event"]: row for row in rows if row["number"] == request.number}
        if answer := next((names[name] for name in ANSWERS if name in names), None):
            return answer
        state, waited_s = "a run that has ended" if is_over else "", time.monotonic() - posted_at
        if not is_over and READ not in names and waited_s > NOTICE_S:
            if withdraw(run, request):
                state = "a launcher that does not answer"
            elif waited_s > 2 * NOTICE_S:
                state = "no answer, and the request is no longer there"
        if state:
            raise RequestError(
                asked=f"{request} {run}",
                found=state,
                why="the launcher that started the ranks reads requests ten times a second",
                do=f"look at the run: allranks show {run}; its launcher may be stopped or killed, "
                "or on a machine that does not see this folder",
            )
        time.sleep(POLL_S)


# --- replay --------------------------------------------------------------------------------------


def _print_result(result: Any, as_object: bool, *, differs: bool) -> None:
    """Print what was compared; exit code 5 if it differs."""
    lines = [printable(line) for line in str(result).splitlines()]
    click.echo(as_json(result.to_data()) if as_object else "\n".join(lines))
    if differs:
        sys.exit(EXIT_DIFFERENCE_FOUND)


@contextmanager
def _in_a_temporary_folder() -> Iterator[None]:
    """A context in which steps are made again: if they are stopped, there is nothing to resume."""
    try:
        yield
    except (Stopped, Interrupted):
        raise Interrupted("interrupted: nothing was compared, and the run is as it was") from None


@click.command(cls=Verb)
@click.argument("run")
@click.option("--step", type=click.IntRange(1), required=True, help="Which, as the display counts.")
@click.option("--ranks", type=click.IntRange(1), help="On so many (default 1 where that is right).")
@click.option("--before", is_flag=True, help="Stop before the step, not after it.")
@click.option("--after", is_flag=True, help="Stop after the step, the default.")
@click.option("--pdb", is_flag=True, help="Look at the step in Python's debugger.")
@click.option("--shell", is_flag=True, help="Look at the step in IPython, or Python's shell.")
@click.option("--save-step", metavar="FILE", help="Write the step as a script of torch alone.")
@click.option("--only-shard", type=click.IntRange(0), metavar="S", help="Of it only this shard.")
@click.option("--changed", is_flag=True, help="Even if the program has changed since.")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
@_in_a_temporary_folder()
def replay(run: str, as_object: bool, **flags: Any) -> None:
    """Make a step of RUN again, in one process, and compare it with what RUN wrote.

    It begins at the newest checkpoint before the step, or at the beginning. The folder of the run
    is read, not changed. Exit code 5: with --bitwise, a digest or a loss is not that of the run.
    """
    where = [flag for flag in ("before", "after") if flags[flag]]
    tools = [flag for flag in ("pdb", "shell", "save_step") if flags[flag]]
    saves = "save_step" in tools
    if len(where) > 1 or len(tools) > 1 or (where and (saves or not tools)):
        several = " ".join(f"--{flag.replace('_', '-')}" for flag in (*tools, *where))
        raise RequestError(
            asked=f"replay {run} {several}",
            found="nothing to look with" if not tools else "two of a kind",
            why="the step is looked at once, before or after it is made, with one tool",
            do="--pdb --before, or --shell --after",
        )
    look = f"{tools[0]}:{(where or ['after'])[0]}" if tools else ""
    look = f"save:{Path(flags['save_step']).absolute()}" if saves else look
    more = {name: flags[name] for name in ("changed", "only_shard")}
    request = ReplayRequest(Path(run), flags["step"], flags["ranks"] or 0, look, **more)
    replayed = replay_step(request)
    _print_result(replayed, as_object, differs=bool(replayed.differs) and replayed.is_promised)


# --- certify, verify -----------------------------------------------------------------------------


@click.command(cls=Verb)
@click.argument("run")
@click.option("-o", "--output", metavar="FILE", help="Where (default RUN.certificate.json).")
def certify(run: str, output: str | None) -> None:
    """Write a certificate of RUN: its program, data, versions, job, digests and weights.

    RUN must be done, and have digests (--digest-every) under --bitwise. Somebody else can make
    steps of it again with `allranks verify`, on any number of ranks.
    """
    name = Path(run).absolute().name
    target = Path(output or f"{name}.certificate.json")
    certificate = certificate_of(Path(run))
    certificate.write(target)
    steps, rows = certificate.result["steps"], len(certificate.digests)
    click.echo(printable(f"{target}: {steps} steps, {rows} rows of digests"))


@click.command(cls=Verb)
@click.argument("certificate")
@click.option("--steps", type=click.IntRange(1), default=5, help="How many rows (default 5).")
@click.option("--ranks", type=click.IntRange(1), help="On so many (default 1).")
@click.option("--run", metavar="RUN", help="Where its checkpoints are (default: as it says).")
@click.option(
    "--within",
    type=click.IntRange(1),
    default=1000,
    help="Make at most so many steps for a row (default 1000).",
)
@click.option("--seed", default="", metavar="WORD", help="Draw other rows (no default).")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
@_in_a_temporary_folder()
def verify(certificate: str, run: str | None, as_object: bool, **options: Any) -> None:
    """Make steps of a CERTIFICATE again, on this machine, and say whether they hold.

    Program and data must be here, with the versions and the kind of processor that it names.
    Steps are made from the beginning, or from the nearest checkpoint of the run. Exit code 5: a
    digest is another one.
    """
    values = {**options, "ranks": options["ranks"] or 0}
    folder = None if run is None else Path(run)
    request = verification.VerifyRequest(path=Path(certificate), run=folder, **values)
    result = verification.verify(request)
    _print_result(result, as_object, differs=not result.holds)


# --- bisect --------------------------------------------------------------------------------------


@click.command(cls=Verb)
@click.argument("run_a")
@click.argument("run_b", required=False)
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
@_in_a_temporary_folder()
def bisect(run_a: str, run_b: str | None, as_object: bool) -> None:
    """Name the first step at which RUN_B differs from RUN_A, and the first tensor within it.

    Without RUN_B the other side is the program and the libraries of today. Steps are made again
    from checkpoints; the folders of the runs are read, not changed. Exit code 5: they differ.
    """
    result = load(BISECT)(Path(run_a), None if run_b is None else Path(run_b))
    _print_result(result, as_object, differs=not result.is_equal)
