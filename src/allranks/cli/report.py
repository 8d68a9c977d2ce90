"""`allranks report RUN…`: one page to look at of what runs have recorded; a trace of them."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.checkpoint.files import as_json
from allranks.cli.display.following import in_words
from allranks.cli.options import Verb
from allranks.errors import RequestError, printable
from allranks.tools.report.bench_page import page_of_benches, read_bench
from allranks.tools.report.check_page import page_of_checks, read_check
from allranks.tools.report.page import (
    BENCHES,
    RUNS,
    kind_of,
    page_of,
    page_path,
    run_folders,
    run_to_data,
    trace_path,
    write_file,
)
from allranks.tools.report.records import labels_of, read_run, understood
from allranks.tools.report.timeline import trace_of


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", help="The page (default RUN/report.html, of several runs report.html here).")
@click.option("--trace", help="Also write a Chrome trace there (default: none).")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def report(runs: tuple[str, ...], out: str | None, trace: str | None, as_object: bool) -> None:
    """Write one HTML file that shows RUN, or several runs beside each other.

    RUN is a run folder, of a job that is over or goes on, or the folder of a sweep; or the folder
    of a bench; or that of `check --keep-runs`, or the object of `check --json` in a file. The page
    loads nothing from anywhere.

    \b
    allranks report runs/digits-20261123-101500-1234-1
    allranks report runs/a runs/b --out comparison.html
    allranks report runs/digits-bench-20261125-101500-1234-1
    """
    kind = kind_of(runs)
    if kind != RUNS:
        _report_records(kind, runs, out, trace, as_object)
        return
    paths = run_folders(runs)
    page, trace_file = page_path(paths, out), trace_path(trace)
    read = [read_run(path, name) for path, name in zip(paths, labels_of(paths), strict=True)]
    written = {"page": str(page)}
    with understood(paths):
        text = page_of(read, in_words)
        traced = None if trace_file is None else as_json(trace_of(read))
        numbers = [run_to_data(run) for run in read] if as_object else []
    write_file(page, text, "--out")
    if trace_file is not None and traced is not None:
        write_file(trace_file, traced, "--trace")
        written["trace"] = str(trace_file)
    for label, path in written.items():
        click.echo(printable(f"{label} {path}"), err=as_object)
    if as_object:
        click.echo(as_json({**written, "runs": numbers}))


def _report_records(
    kind: str, names: tuple[str, ...], out: str | None, trace: str | None, as_object: bool
) -> None:
    """The page of benches or of checks."""
    if trace is not None:
        raise RequestError(
            asked=f"report {' '.join(names)} --trace {trace}",
            found=kind,
            why="a trace is of runs",
            do="report a run of it: turn-K/STRATEGY-RANKS in the folder of a bench",
        )
    paths = [Path(name) for name in dict.fromkeys(names)]
    page = page_path(paths, out)
    labelled = list(zip(paths, labels_of(paths), strict=True))
    if kind == BENCHES:
        text = page_of_benches([read_bench(path, label) for path, label in labelled])
    else:
        text = page_of_checks([read_check(path, label) for path, label in labelled])
    write_file(page, text, "--out")
    click.echo(printable(f"page {page}"), err=as_object)
    if as_object:
        click.echo(as_json({"page": str(page), kind: [str(path) for path in paths]}))
