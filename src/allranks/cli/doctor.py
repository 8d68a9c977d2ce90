"""`allranks doctor`: would a run work here, how fast are its links, what did dead runs leave?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.catalog import load
from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import say
from allranks.cli.options import PLACES, Verb, rendezvous_from, rendezvous_options, words_of
from allranks.errors import EXIT_PLACE_FAILED, RequestError, printable
from allranks.job.config import resolve
from allranks.launcher.nodes.cluster import take_part
from allranks.launcher.places import NodeRequest, is_head
from allranks.tools.doctor.cleaning import Cleaned, Leftover, clean
from allranks.tools.doctor.doctor import diagnose
from allranks.tools.doctor.folder import WORKS
from allranks.tools.doctor.probes import METHOD, Cells, Matrix
from allranks.tools.doctor.rules import STOP, UNKNOWN, WARNING, Diagnosis, NodeReport

GPUS = "allranks.tools.doctor.gpus:examine"  # it needs numpy
RUNS = "runs"
ANY_PROGRAM = "digits"
WIDE = 10_000  # columns of what is no terminal: no line is broken
COLOURS = {STOP: "bold red", WARNING: "yellow"}


@click.command(cls=Verb)
@click.option("--ranks", type=int, help="Ranks (processes) over all nodes (default: 2 or more).")
@click.option("--nodes", type=int, help="Nodes to look at (default 1).")
@click.option("--place", help=PLACES)
@rendezvous_options
@click.option("--run-dir", help="Run folder of the job (default runs/…).")
@click.option("--program", help="A file that must be the same on all nodes (default: none).")
@click.option(
    "--clean",
    "leftovers",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[RUN]",
    help="Only remove what dead runs left on this machine; RUN: what that one left.",
)
@click.option(
    "--gpus",
    "rows",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[ROWS]",
    help="Train on the GPUs, and say which promises hold there; ROWS: only these, as bits,fsdp.",
)
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def doctor(leftovers: str | None, rows: str | None, as_object: bool, **flags: Any) -> None:
    """Look at the nodes of a run before it starts: versions, limits, folders, and their network.

    \b
    allranks doctor
    allranks doctor --nodes 2 --place simulated:link=1gbit
    allranks doctor --nodes 2 --hosts hosts.txt --run-dir runs/first --program mytask.py
    allranks doctor --gpus
    allranks doctor --clean

    Leaves with 0 if nothing would stop a run, with --gpus if no promise failed; otherwise with 3.
    """
    if leftovers is not None:
        _clean(leftovers, {**flags, "gpus": rows}, as_object)
        return
    if rows is not None:
        _try_gpus(rows, flags, as_object)
        return
    words = words_of(flags, "doctor")
    rendezvous, implied = rendezvous_from(flags)
    program = _checked_program(flags["program"])
    if not is_head(rendezvous):
        sys.exit(take_part(rendezvous, words, program))
    nodes = flags["nodes"] or 1
    values = {**flags, "nodes": nodes, **implied}
    values["ranks"] = values["ranks"] if values["ranks"] is not None else max(2, nodes)
    options = {n: values[n] for n in ("ranks", "nodes", "place") if values[n] is not None}
    job = resolve(ANY_PROGRAM, options).job
    run_dir = Path(os.path.abspath(flags["run_dir"] or Path(RUNS, "new")))
    request = NodeRequest(job.place, job.nodes, job.ranks, rendezvous, program, words)
    diagnosis = diagnose(request, _there(run_dir.parent), say)
    if as_object:
        click.echo(as_json(diagnosis.to_data()))
    else:
        show(diagnosis)
    if diagnosis.stops:
        sys.exit(EXIT_PLACE_FAILED)


def _try_gpus(rows: str, flags: dict[str, Any], as_object: bool) -> None:
    """Train on the GPUs; a line for each promise as it was looked at, and two files of all."""
    for word in ("program", "rendezvous"):
        if flags[word]:
            raise RequestError(
                asked=f"doctor --gpus --{word} {flags[word]}",
                found="many jobs, one after the other, of tasks of its own",
                why="it reads no other program, and nodes started by hand take part in one job",
                do="no --program; for several nodes --nodes with --hosts, or --place slurm",
            )
    words = words_of(flags, "doctor", f"gpus={rows}")
    rendezvous, implied = rendezvous_from(flags)
    more = {name: value for name, value in {**flags, **implied}.items() if value is not None}
    ranks, run_dir = more.pop("ranks", None), more.pop("run_dir", None)
    folder = Path(os.path.abspath(run_dir or Path(RUNS, f"gpus-{time.strftime('%Y%m%d-%H%M%S')}")))
    record = load(GPUS)(rows, folder, say, ranks, more=more, rendezvous=rendezvous, words=words)
    click.echo(as_json(record) if as_object else (folder / "gpus.md").read_text(), nl=as_object)
    say(f"with a report of a bug, send {folder / 'gpus.json'}")
    if any(row["verdict"] == "failed" for row in record["rows"]):
        sys.exit(EXIT_PLACE_FAILED)


def _checked_program(program: str | None) -> str:
    if program and not Path(program if program.endswith(".py") else "").is_file():
        raise RequestError(
            asked=f"--program {program}",
            found=f"no such file of Python in {Path.cwd()}",
            why="its content is compared between the nodes",
            do="name the .py file of the task, or leave --program out",
        )
    return program or ""


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: a job would make the rest."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _clean(run: str, flags: dict[str, Any], as_object: bool) -> None:
    others = [name for name, value in flags.items() if value is not None and name != "run_dir"]
    if others:
        raise RequestError(
            asked=f"--clean with --{others[0].replace('_', '-')}",
            found="two things to do",
            why="--clean removes what is left on this machine, and looks at nothing else",
            do="--clean by itself, on each machine that needs it",
        )
    if run and not Path(run).is_dir():
        raise RequestError(
            asked=f"--clean {run}",
            found="no such folder",
            why="what a run left is found by its run folder",
            do="see `allranks runs`; --clean without RUN removes what all dead runs left",
        )
    runs = Path(os.path.abspath(run or flags["run_dir"] or Path(RUNS, "new"))).parent
    cleaned = clean(Path(run) if run else None, runs if runs.is_dir() else None)
    if as_object:
        parts = {"removed": cleaned.removed, "still_there": cleaned.still_there}
        click.echo(as_json({n: list(map(_as_data, part)) for n, part in parts.items()}))
    else:
        _print_cleaned(cleaned)
    if cleaned.still_there:
        sys.exit(EXIT_PLACE_FAILED)


def _as_data(leftover: Leftover) -> dict[str, Any]:
    names = ("kind", "name", "pid", "run")
    return {name: getattr(leftover, name) for name in names}


def _print_cleaned(cleaned: Cleaned) -> None:
    for verb, leftovers in (("removed", cleaned.removed), ("still there", cleaned.still_there)):
        for leftover in leftovers:
            subject = f"process {leftover.pid} ({leftover.name})" if leftover.pid else leftover.name
            of = f", of run {leftover.run}" if leftover.run else ""
            click.echo(printable(f"{verb}: {subject}{of}"))
    if not cleaned.removed and not cleaned.still_there:
        click.echo("no run that is dead has left anything here")


# --- what a person sees ---------------------------------------------------------------------------


def show(diagnosis: Diagnosis) -> None:
    """Print it to standard output; plain text where that is no terminal."""
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else WIDE, highlight=False)
    with console.capture() as drawn:
        _draw(console, diagnosis, terminal)
    for line in drawn.get().splitlines():
        click.echo(line.rstrip())


def _draw(console: Console, diagnosis: Diagnosis, terminal: bool) -> None:
    requested, reached = diagnosis.asked_nodes, len(diagnosis.nodes)
    only = "; what was found here is of this machine only" if reached < requested else ""
    ranks = f"{_count(diagnosis.ranks, 'rank')} on {_count(requested, 'node')}"
    console.print(_text(f"{ranks}, {diagnosis.place}{only}"))
    console.print(_nodes(diagnosis.nodes, terminal))
    if diagnosis.matrix is not None:
        _show_matrix(console, diagnosis.matrix, terminal)
    for finding in diagnosis.findings:
        where = f" on {finding.node}" if finding.node else ""
        head = _text(f"{finding.level}: {finding.subject}{where}", COLOURS.get(finding.level, ""))
        console.print(head)
        for line in (*finding.found.splitlines(), f"do: {finding.do}"):
            console.print(_text(f"  {line}"))
    console.print(_text(_verdict(diagnosis)))


def _verdict(diagnosis: Diagnosis) -> str:
    stops = sum(finding.level == STOP for finding in diagnosis.findings)
    return f"{_count(stops, 'thing')} would stop a run" if stops else "nothing would stop a run"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _text(line: str, style: str = "") -> Text:
    return Text(printable(line), style)


def _table(terminal: bool, heads: bool = True) -> Table:
    box = SIMPLE_HEAD if terminal else None
    return Table(box=box, pad_edge=False, show_edge=False, show_header=heads)


def _nodes(nodes: Sequence[NodeReport], terminal: bool) -> Table:
    """A row for each property; if nodes differ in it, one for each value, with its nodes."""
    table = _table(terminal, heads=len(nodes) > 1)
    for head in ("", "", "nodes") if len(nodes) > 1 else ("", ""):
        table.add_column(head)
    for row, template in ROWS.items():
        names_by_value: dict[str, list[str]] = {}
        for node in nodes:
            value = template.format(**node.values(), outcomes=_outcomes(node))
            names_by_value.setdefault(value, []).append(node.name)
        for position, (value, names) in enumerate(names_by_value.items()):
            has = "all" if len(names_by_value) == 1 else ", ".join(names)
            cells = ("" if position else row, value, has)
            table.add_row(*map(_text, cells[: len(table.columns)]))
    return table


ROWS = {
    "host": "{host}",
    "joined by": "{interface} {address}",
    "interfaces": "{interfaces}",
    "allranks": "{allranks} (source {source})",
    "python": "{python}",
    "torch": "{torch}",
    "packages": "{packages}",
    "program": "{program}",
    "system": "{system}",
    "processor": "{processor}",
    "cores": "{cores}",
    "memory": "{memory}",
    "devices": "{devices}",
    "shared memory": "{shared_memory} free",
    "open files": "{open_files}",
    "folder of runs": "{path}: {kind}, {free} free",
    "tried there": "{outcomes}",
}


def _outcomes(node: NodeReport) -> str:
    """What failed in the folder of runs, or that all worked."""
    tried = {} if node.folder is None else node.folder.tried
    failed = [f"{name}: {outcome}" for name, outcome in tried.items() if outcome != WORKS]
    return ", ".join(failed) or (f"{', '.join(tried)}: all work" if tried else UNKNOWN)


def _show_matrix(console: Console, matrix: Matrix, terminal: bool) -> None:
    tables = (
        ("round trip in µs", matrix.round_trip_us, METHOD["round_trip_us"]),
        ("MB/s", matrix.mb_per_s, METHOD["mb_per_s"]),
    )
    for title, cells, how in tables:
        console.print()
        console.print(_text(f"{title}, from a row to a column: {how}"))
        console.print(_matrix(matrix, cells, terminal))
    console.print()


def _matrix(matrix: Matrix, cells: Cells, terminal: bool) -> Table:
    table = _table(terminal)
    table.add_column("")
    for end in matrix.ends:
        table.add_column(f"rank {end.rank}", justify="right")
    for number, (end, row) in enumerate(zip(matrix.ends, cells, strict=True)):
        values = [
            "·" if number == other else "?" if value is None else f"{value:,.1f}"
            for other, value in enumerate(row)
        ]
        table.add_row(_text(f"rank {end.rank} {end.node}"), *values)
    return table
