"""`allranks doctor`: would a run work here, how fast are its links, what did dead runs leave?"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from allranks.catalog import load
from allranks.checkpoint.files import as_json
from allranks.cli.display.diagnosis import show
from allranks.cli.display.progress import say
from allranks.cli.options import rendezvous_from, rendezvous_options, words_of
from allranks.errors import EXIT_PLACE_FAILED, RequestError, printable
from allranks.job.config import resolve
from allranks.launcher.nodes.cluster import is_head, take_part
from allranks.launcher.places.base import NodeRequest
from allranks.tools.doctor.cleaning import Cleaned, Leftover, clean
from allranks.tools.doctor.doctor import diagnose

GPUS = "allranks.tools.doctor.gpus:examine"  # it needs numpy
RUNS = "runs"
ANY_PROGRAM = "digits"


@click.command()
@click.option("--ranks", type=int, help="World size over all nodes (default: 2 or more).")
@click.option("--nodes", type=int, help="Nodes to look at (default 1).")
@click.option("--place", help="local, simulated[:link=1gbit,delay=1ms], or slurm.")
@rendezvous_options
@click.option("--run-dir", help="The run folder that a job would make (default runs/…).")
@click.option("--program", help="A file that has to be the same on every node.")
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
