"""`allranks runs` and `allranks show RUN`: what jobs have left behind."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.display.following import anomalies_in
from allranks.cli.display.placement import as_data, table
from allranks.cli.display.progress import in_sentences
from allranks.errors import RequestError, printable
from allranks.job.place import read_placements
from allranks.job.resume import how_to_resume
from allranks.job.run_folder import is_in_use, read_events
from allranks.job.units import format_bytes
from allranks.strategies.resolve import strategy_spec
from allranks.tools.report.records import outcome_of, read_job, read_watched
from allranks.tools.report.tables import COMMAND_DEFAULTS
from allranks.training.record.phases import held_in

MOST_NOTES = 10
HEADING_FIELDS = ("schema", "kind", "program", "processes", "run_dir")


@click.command()
@click.argument("folder", default="runs")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def runs(folder: str, as_object: bool) -> None:
    """List the run folders in FOLDER (default: runs), the newest first."""
    paths = sorted(Path(folder).glob("*/job.toml"), key=lambda path: -path.stat().st_mtime)
    rows = [_row(path.parent) for path in paths]
    if as_object:
        click.echo(as_json(rows))
        return
    for row in rows:
        summary = row["summary"] or {}
        metrics = "  ".join(f"{n} {float(v):.4f}" for n, v in summary.get("eval", {}).items())
        line = f"{row['run_dir']}  {row['state']:<11} {row['program']} × {row['ranks']}  {metrics}"
        click.echo(printable(line.rstrip()))
    if not rows:
        click.echo(printable(f"no run folder in {folder}"), err=True)


@click.command()
@click.argument("run")
@click.option("--placement", is_flag=True, help="What each rank holds on which device.")
@click.option("--job", "whole_job", is_flag=True, help="Its job file too, with every default.")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def show(run: str, placement: bool, whole_job: bool, as_object: bool) -> None:
    """Show one run: its state, its result or its first fault, and what was asked of it."""
    path = Path(run)
    if not (path / "job.toml").is_file():
        raise RequestError(
            asked=f"show {run}",
            found="no job.toml in it",
            why="a run folder always has one",
            do="see `allranks runs` for those there are",
        )
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
    click.echo(printable(f"{row['program']} × {row['ranks']}: {row['state']}"))
    if watched is not None:
        click.echo("\n".join(printable(line) for line in str(watched).splitlines()))
    if row["summary"]:
        click.echo(in_sentences(row["summary"]))
    if row["memory"]:
        click.echo(_memory_in_words(row["memory"]))
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


def _went_wrong(path: Path) -> list[str]:
    """Notes about problems during the run, the first `MOST_NOTES` in full."""
    problems = [problem for event in read_events(path) for _, problem in anomalies_in(event)]
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
    return ["asked of it", *lines]


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
        nothing = dict.fromkeys(("program", "ranks", "summary", "fault", "memory"))
        return {"run_dir": str(path), "state": "unreadable", **nothing}
    is_running = is_in_use(path)
    events = read_events(path)
    outcome = outcome_of(path, events, is_running)
    return {
        "run_dir": str(path),
        "state": outcome.state,
        "program": job["program"],
        "ranks": job["ranks"],
        "summary": outcome.summary,
        "fault": outcome.fault,
        "memory": {str(rank): use.to_data() for rank, use in held_in(events).items()},
    }
