"""A diagnosis for people: tables of the nodes and of the ways between ranks, then what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.errors import printable
from allranks.job.units import format_bytes
from allranks.tools.doctor.diagnosis import STOP, WARNING, Cells, Diagnosis, Matrix, NodeReport
from allranks.tools.doctor.examination import WORKS, Examination

WIDE = 10_000  # columns of what is no terminal: no line is broken
UNKNOWN = "unknown"
COLOURS = {STOP: "bold red", WARNING: "yellow"}


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
    for name, value_of in ROWS.items():
        names_by_value: dict[str, list[str]] = {}
        for node in nodes:
            names_by_value.setdefault(value_of(node), []).append(node.name)
        for position, (value, names) in enumerate(names_by_value.items()):
            has = "all" if len(names_by_value) == 1 else ", ".join(names)
            cells = ("" if position else name, value, has)
            table.add_row(*map(_text, cells[: len(table.columns)]))
    return table


def _seen(value_of: Callable[[Examination], str]) -> Callable[[NodeReport], str]:
    """The value of an exam; unknown where the node could not be looked at."""
    return lambda node: UNKNOWN if node.examination is None else value_of(node.examination)


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _packages(node: NodeReport) -> str:
    others = {name: v for name, v in node.facts.packages.items() if name != "torch"}
    return ", ".join(f"{name} {version}" for name, version in others.items()) or "none"


def _cores(exam: Examination) -> str:
    quota = "" if exam.cpu_quota is None else f", the time of {exam.cpu_quota:g}"
    return f"{exam.cores_allowed} of {exam.cores or UNKNOWN}{quota}"


def _memory(node: NodeReport) -> str:
    exam = node.examination
    if exam is None:
        return _size(node.facts.memory_bytes)
    limit = exam.memory_limit_bytes
    more = "" if limit is None else f", limit {_size(limit)}"
    return f"{_size(node.facts.memory_bytes)}, {_size(exam.memory_available_bytes)} free{more}"


def _shared_memory(exam: Examination) -> str:
    return f"{_size(exam.shared_memory_bytes)}, {_size(exam.shared_memory_free_bytes)} free"


def _folder(exam: Examination) -> str:
    folder = exam.folder
    kind = folder.kind or f"{UNKNOWN} kind"
    return f"{folder.path}: {kind}, {_size(folder.free_bytes)} free"


def _tried(exam: Examination) -> str:
    """What failed there, or that all worked."""
    tried = {name.replace("_", " "): outcome for name, outcome in exam.folder.tried.items()}
    failed = [f"{name}: {outcome}" for name, outcome in tried.items() if outcome != WORKS]
    return ", ".join(failed) or f"{', '.join(tried)}: all work"


def _interfaces(node: NodeReport) -> str:
    speeds = {} if node.examination is None else node.examination.speed_mbit
    return ", ".join(
        f"{name} {address}" + (f" ({speeds[name]} Mbit/s)" if speeds.get(name) else "")
        for name, address in node.interfaces.items()
    )


def _clock(node: NodeReport) -> str:
    if node.clock_offset_s is None or node.clock_error_s is None:
        return UNKNOWN
    return f"{1e3 * node.clock_offset_s:+.1f} ms ± {1e3 * node.clock_error_s:.1f} ms"


ROWS: dict[str, Callable[[NodeReport], str]] = {
    "host": lambda node: node.facts.host,
    "joined by": lambda node: f"{node.interface or UNKNOWN} {node.address or ''}".rstrip(),
    "interfaces": lambda node: _interfaces(node) or "none",
    "allranks": lambda node: f"{node.facts.allranks} (source {node.facts.source})",
    "python": lambda node: node.facts.python,
    "torch": lambda node: node.facts.packages.get("torch", "none"),
    "packages": _packages,
    "program": lambda node: node.facts.program or "none named",
    "system": lambda node: node.facts.system,
    "processor": lambda node: node.facts.processor or UNKNOWN,
    "cores": _seen(_cores),
    "memory": _memory,
    "devices": lambda node: ", ".join(node.facts.gpus) or "no GPU",
    "shared memory": _seen(_shared_memory),
    "open files": _seen(lambda exam: str(exam.open_files)),
    "folder of runs": _seen(_folder),
    "tried there": _seen(_tried),
    "clock ahead": _clock,
}


def _show_matrix(console: Console, matrix: Matrix, terminal: bool) -> None:
    method = matrix.to_data()["method"]
    tables = (
        ("round trip in µs", matrix.round_trip_us, method["round_trip_us"]),
        ("MB/s", matrix.mb_per_s, method["mb_per_s"]),
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
