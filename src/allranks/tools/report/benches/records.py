"""Reads the record of a bench: `bench.json` in the folder of the bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.tools.bench.plan import BenchPlan
from allranks.tools.bench.results import SCHEMA, BenchRow, row_from

RECORD = "bench.json"


@dataclass(frozen=True)
class Bench:
    """The results of one bench; `label` distinguishes it from other benches."""

    path: Path
    label: str
    plan: BenchPlan
    machine: Mapping[str, Any]
    rows: tuple[BenchRow, ...]

    @property
    def measured(self) -> tuple[BenchRow, ...]:
        """The rows with a speed."""
        return tuple(row for row in self.rows if row.speed is not None)


def read_bench(path: Path, label: str) -> Bench:
    """The record below `path`; raises `RequestError` if this version cannot read it."""
    record = path / RECORD
    try:
        data = json.loads(record.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, and this version reads {SCHEMA}")
        settings = {**data["settings"], "words": tuple(data["settings"]["words"])}
        plan = BenchPlan(combinations=(), **settings)
        return Bench(path, label, plan, data["machine"], tuple(map(row_from, data["rows"])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(
            asked=f"report {path}",
            found=f"{type(error).__name__}: {error} (in {RECORD})",
            why="its record is not what a bench of this version writes",
            do="report it with the version of allranks that made it",
        ) from None
