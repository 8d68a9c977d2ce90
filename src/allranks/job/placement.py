"""The placement of every tensor of a training: rank, device and size in bytes.

Ranks write what they hold (`write_placement`); the command line reads it, and folds into one line
what several ranks hold alike. Unknown is `None`: what the optimizer keeps, before its first update.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.checkpoint.files import as_json, write_whole

FOLDER = "placement"
PARAMETER, BUFFER, AVERAGE = "parameter", "buffer", "average"
OPTIMIZER, GATHERED, GLOBAL = "optimizer", "gathered", "global"
SHAPES = ("shape", "whole")


@dataclass(frozen=True)
class Placed:
    """One tensor on one device, and what belongs to it: its gradient, and what the optimizer keeps.

    `replica` counts the copies of the model in one process, `part` the parts of one that is on
    several devices; `kind` is `parameter`, `buffer`, `average` (of the weights), `global` (weights
    that learners agree on, with what they send of them and its momentum), `optimizer` (kept for no
    weight), or `gathered` (of a micro-batch).
    Where ranks hold a part each, `whole` is the shape of all of it.
    """

    kind: str
    name: str
    device: str
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None
    gradient_bytes: int | None = 0
    optimizer_bytes: int | None = 0
    replica: int = 0
    part: int = 0
    whole: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Totals:
    """The bytes that one replica on one rank holds, or one part of a model that is on several
    devices; what is gathered lives within a step only."""

    replica: int
    part: int
    device: str
    bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    gathered_bytes: int | None

    @property
    def all_bytes(self) -> int | None:
        """Between the steps, with the gradients."""
        return _sum((self.bytes, self.gradient_bytes, self.optimizer_bytes))


@dataclass(frozen=True)
class RankPlacement:
    """What one rank holds."""

    rank: int
    rows: tuple[Placed, ...]

    @property
    def totals(self) -> tuple[Totals, ...]:
        """One for each replica, or part of one."""
        found = []
        for replica, part in sorted({(row.replica, row.part) for row in self.rows}):
            rows = [row for row in self.rows if (row.replica, row.part) == (replica, part)]
            found.append(
                Totals(
                    replica,
                    part,
                    rows[0].device,
                    _sum(row.bytes for row in rows if row.kind != GATHERED),
                    _sum(row.gradient_bytes for row in rows),
                    _sum(row.optimizer_bytes for row in rows),
                    _sum(row.bytes for row in rows if row.kind == GATHERED),
                )
            )
        return tuple(found)

    @property
    def all_bytes(self) -> int | None:
        """Of all its replicas and parts, between the steps."""
        return _sum(total.all_bytes for total in self.totals)

    def to_data(self) -> dict[str, Any]:
        """As plain data, with the totals."""
        totals = [{**dataclasses.asdict(t), "all_bytes": t.all_bytes} for t in self.totals]
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"rank": self.rank, "totals": totals, "rows": rows}


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum; unknown if one of them is."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def placement_path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank:03d}.json"


def write_placement(run_dir: Path, rank: int, rows: Iterable[Placed]) -> None:
    """Write what a rank holds, whole or not at all."""
    path = placement_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, as_json(RankPlacement(rank, tuple(rows)).to_data()).encode())


def read_placements(run_dir: Path, ranks: int) -> list[RankPlacement]:
    """What the ranks of a job have written, without those that only an earlier start had."""
    found = []
    for rank in range(ranks):
        path = placement_path(run_dir, rank)
        if path.is_file():
            rows = json.loads(path.read_text())["rows"]
            found.append(RankPlacement(rank, tuple(map(_read, rows))))
    return found


def _read(row: dict[str, Any]) -> Placed:
    shapes = {key: None if row[key] is None else tuple(row[key]) for key in SHAPES if key in row}
    return Placed(**{**row, **shapes})
