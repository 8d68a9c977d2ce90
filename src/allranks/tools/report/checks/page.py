"""The page of checks, from what `allranks check --json` said or a kept folder has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.tools.report.charts import letter_of
from allranks.tools.report.checks import RECORD
from allranks.tools.report.numbers import UNKNOWN
from allranks.tools.report.page import rendered
from allranks.tools.report.tables import LEFT, RIGHT, Table

NEEDED = ("equal", "program", "strategy", "looks", "not_checked")


@dataclass(frozen=True)
class Check:
    """What one check found, as it said it; `label` tells it from other checks."""

    path: Path
    label: str
    said: Mapping[str, Any]


@dataclass(frozen=True)
class CheckView:
    """All that the page shows of one check."""

    check: Check
    letter: str
    state: str
    tone: str
    looks: Table
    first: Mapping[str, Any] | None
    where: str


def is_check(data: Any) -> bool:
    """Whether a record is that of a check."""
    return isinstance(data, dict) and all(name in data for name in NEEDED)


def read_check(path: Path, label: str) -> Check:
    """The record at `path`, a file or a folder; raises `RequestError` where it is none."""
    record = path / RECORD if path.is_dir() else path
    try:
        text = record.read_text().strip()
        said = json.loads(text.splitlines()[-1])  # what was kept of stdout: its last line
    except (OSError, ValueError, LookupError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
    if not is_check(said):
        raise _unreadable(path, "no record of a check")
    return Check(path, label, said)


def page_of_checks(checks: Sequence[Check]) -> str:
    """The page of these checks, as text."""
    several = len(checks) > 1
    views = [_view(c, letter_of(n) if several else "") for n, c in enumerate(checks)]
    programs = dict.fromkeys(str(check.said["program"]) for check in checks)
    title = ", ".join(programs)
    return rendered(
        "checks.html", f"{len(checks)} checks of {title}" if several else title, [], views=views
    )


def _view(check: Check, letter: str) -> CheckView:
    said = check.said
    looks = [look for look in said["looks"] if look["asked"]]
    deciding = next((look for look in looks if look["first_difference"]), None)
    rows = tuple(_cells(look) for look in said["looks"])
    head = ("looked at", "steps", "what counts as equal", "largest difference", "found")
    state = "equal to one process" if said["equal"] else "different from one process"
    return CheckView(
        check,
        letter,
        state,
        "good" if said["equal"] else "bad",
        Table(head, rows, (LEFT, RIGHT, RIGHT, RIGHT, LEFT)),
        deciding["first_difference"] if deciding else None,
        _where(deciding) if deciding else "",
    )


def _where(look: Mapping[str, Any]) -> str:
    ranks = look["ranks"]
    who = "one process" if look["one_process"] else f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{who}, {look['precision']}{', bitwise' if look['bitwise'] else ''}"


def _cells(look: Mapping[str, Any]) -> tuple[str, ...]:
    first = look["first_difference"]
    tolerance, largest = float(look["tolerance"]), look["largest_difference"]
    found = "equal" if first is None else f"{first['stage']} differs at step {first['step']}"
    if not look["asked"]:
        found += ", which the job does not promise"
    return (
        _where(look),
        f"{look['steps']:,}",
        f"{tolerance:.1e}" if tolerance else "equal bits",
        UNKNOWN if largest is None else f"{float(largest):.1e}",
        found,
    )


def _unreadable(path: Path, found: str) -> RequestError:
    return RequestError(
        asked=f"report {path}",
        found=found,
        why="a check is reported from the object of `allranks check --json`, or the folder that "
        "--keep-runs names",
        do="allranks check PROGRAM --keep-runs FOLDER, then allranks report FOLDER",
    )
