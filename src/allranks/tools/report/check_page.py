"""The page of checks, from the output of `allranks check --json` or a kept folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.tools.report.numbers import UNKNOWN, Series, counted
from allranks.tools.report.page import findings_of, rendered
from allranks.tools.report.plot import Chart, PlotLine, letter_of
from allranks.tools.report.records import CHECK_RECORD, UNREADABLE
from allranks.tools.report.tables import LEFT, RIGHT, Table
from allranks.tools.script_check.rules.facts import NOT_ALL, counted_findings

NEEDED = ("equal", "program", "strategy", "looks", "not_checked")
OF_SCRIPT = ("findings", "unwatched", "ranks")
NO_TABLE = Table((), (), ())


@dataclass(frozen=True)
class CheckResult:
    """The record of one check; `label` distinguishes it from other checks."""

    path: Path
    label: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class CheckView:
    """All that the page shows of one check."""

    check: CheckResult
    letter: str
    state: str
    tone: str
    words: str
    looks: Table = NO_TABLE
    first: Mapping[str, Any] | None = None
    cause: Mapping[str, Any] | None = None
    where: str = ""
    drift: Mapping[str, Any] | None = None
    findings: Sequence[Mapping[str, Any]] = ()
    charts: tuple[tuple[int, Chart], ...] = ()


def is_check(data: Any) -> bool:
    """Whether a record is that of a check, of a task or of a script."""
    kinds = NEEDED, OF_SCRIPT
    return isinstance(data, dict) and any(all(name in data for name in each) for each in kinds)


def _is_of_script(record: Mapping[str, Any]) -> bool:
    return all(name in record for name in OF_SCRIPT)


def read_check(path: Path, label: str) -> CheckResult:
    """The record at `path`, a file or a folder; raises `RequestError` if it is none."""
    record = path / CHECK_RECORD if path.is_dir() else path
    try:
        text = record.read_text().strip()
        content = json.loads(text.splitlines()[-1])  # of a saved stdout, the last line
    except (OSError, ValueError, LookupError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
    if not is_check(content):
        raise _unreadable(path, "no record of a check")
    return CheckResult(path, label, content)


def page_of_checks(checks: Sequence[CheckResult]) -> str:
    """The page of these checks, as text."""
    several = len(checks) > 1
    views, charts = list[CheckView](), list[Chart]()
    for number, check in enumerate(checks):
        try:
            check_charts = _charts(check)
            numbered = tuple(enumerate(check_charts, start=len(charts)))
            views.append(_view(check, letter_of(number) if several else "", numbered))
        except UNREADABLE as error:
            raise _unreadable(check.path, f"{type(error).__name__}: {error}") from error
        charts += check_charts
    programs = dict.fromkeys(_program(check.record) for check in checks)
    title = ", ".join(programs)
    title = f"{len(checks)} checks of {title}" if several else title
    return rendered("checks.html", title, charts, views=views)


STATES = {
    True: ("equal to one process", "good"),
    False: ("different from one process", "bad"),
    None: ("not judged", "open"),
}


def _charts(check: CheckResult) -> list[Chart]:
    """The drift of an approximate strategy, step by step; nothing for others."""
    steps = (check.record.get("drift") or {}).get("steps") or []
    if not steps:
        return []
    xs = tuple(float(step["step"]) for step in steps)

    def line(name: str, key: str, colour: int) -> PlotLine:
        return PlotLine(name, Series(name, xs, tuple(float(step[key]) for step in steps)), colour)

    distance = "weights apart, of the way from the start"
    losses = (line("loss", "loss", 0), line("of one process", "loss_of_one_process", 1))
    return [
        Chart("Drift of the weights", (line(distance, "weights_apart", 0),), note=distance),
        Chart("Loss", losses, note="the other colour: one process"),
    ]


def _view(check: CheckResult, letter: str, charts: tuple[tuple[int, Chart], ...]) -> CheckView:
    record = check.record
    if _is_of_script(record):
        return _view_of_script(check, letter)
    looks = [look for look in record["looks"] if look["asked"]]
    deciding: dict[str, Any] = next((look for look in looks if look["first_difference"]), {})
    rows = tuple(_cells(look) for look in record["looks"])
    head = ("looked at", "steps", "what counts as equal", "largest difference", "found")
    state, tone = STATES[record["equal"]]
    return CheckView(
        check,
        letter,
        state,
        tone,
        words=str(record["strategy"]),
        looks=Table(head, rows, (LEFT, RIGHT, RIGHT, RIGHT, LEFT)),
        first=deciding.get("first_difference"),
        cause=deciding.get("cause"),
        where=_where(deciding) if deciding else "",
        drift=record.get("drift"),
        charts=charts,
    )


def _program(record: Mapping[str, Any]) -> str:
    """The program of a check; a record of a script from before it had its command names its run."""
    if not _is_of_script(record):
        return str(record["program"])
    return str(record.get("command") or Path(record.get("run_dir", "a script")).name)


def _view_of_script(check: CheckResult, letter: str) -> CheckView:
    """The findings of `check -- COMMAND`."""
    record, ranks = check.record, counted(int(check.record["ranks"]), "rank")
    count = len(record["findings"])
    state = counted_findings(count, is_all=not record["unwatched"])
    doubt = f"; {record['doubt']}" if record.get("doubt") else ""
    missing = doubt + (NOT_ALL if record["unwatched"] else "")
    return CheckView(
        check,
        letter,
        f"{state} on {ranks}{missing}",
        "bad" if count or missing else "good",
        words=f"a script, watched on {ranks}",
        findings=findings_of(record),
    )


def _where(look: Mapping[str, Any]) -> str:
    ranks = look["ranks"]
    processes = "one process" if look["one_process"] else f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{processes}, {look['precision']}{', bitwise' if look['bitwise'] else ''}"


def _cells(look: Mapping[str, Any]) -> tuple[str, ...]:
    first = look["first_difference"]
    tolerance, largest = float(look["tolerance"]), look["largest_difference"]
    text = "equal" if first is None else f"{first['stage']} differs at step {first['step']}"
    if not look["asked"]:
        text += ", which the job does not promise"
    return (
        _where(look),
        f"{look['steps']:,}",
        f"{tolerance:.1e}" if tolerance else "equal bits",
        UNKNOWN if largest is None else f"{float(largest):.1e}" if largest else "none",
        text,
    )


def _unreadable(path: Path, found: str) -> RequestError:
    return RequestError(
        asked=f"report {path}",
        found=found,
        why="a check is reported from the object of `allranks check --json`, or the folder that "
        "--keep-runs names",
        do="allranks check PROGRAM --keep-runs FOLDER, then allranks report FOLDER",
    )
