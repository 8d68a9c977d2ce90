"""A finding: a fault of a script, where it is, what it does to the result, and what to do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

RESULT, FILES, COST, OUTPUT = "result", "files", "cost", "output"
ORDER = (RESULT, FILES, COST, OUTPUT)


@dataclass(frozen=True)
class Finding:
    """`touches` says what is not as it should be: the result, files, only the cost, or output."""

    name: str
    touches: str
    where: tuple[str, int] | None
    found: str
    effect: str
    fix: str

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        values = dataclasses.asdict(self)
        file, line = self.where or (None, None)
        values.pop("where")
        return {**values, "file": file, "line": line}

    def __str__(self) -> str:
        lead = f"{place_of(self.where)}: {self.name} ({self.touches})"
        return f"{lead}\n  found:  {self.found}\n  effect: {self.effect}\n  fix:    {self.fix}"


def place_of(where: tuple[str, int] | None) -> str:
    """`train.py:12`, from the working folder where it is below it."""
    if where is None:
        return "(no line of the script)"
    near = os.path.relpath(where[0])
    return f"{where[0] if near.startswith('..') else near}:{where[1]}"


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What touches the result first, then by place; each once."""
    once = dict.fromkeys(findings)
    return tuple(sorted(once, key=lambda one: (ORDER.index(one.touches), one.where or ("", 0))))


def names_among(names: Iterable[str], most: int = 3) -> str:
    """Some of the names, and how many more there are."""
    all_names = list(names)
    more = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {more} more" if more > 0 else "")
