"""The first tensor and operator of a step that are not the same in two records of it.

Reads files only: what `torch.witness.step_record` has written on each side. The sides may have
different numbers of ranks: passes correspond in the order of the ranks, and the digests of the
parts of a tensor add up to that of the whole.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from allranks.tools.check.operators import OperatorSearch, compare_operators

OPERATORS, MASK = "operators", 2**64 - 1
STAGES = (
    *("sample numbers", "sample", "state before the step", "weights in the passes"),
    *("generator before the step", "generator in the pass", "losses"),
    *("gradient", "clipped gradient", "state after the update"),
    *(AFTER_UPDATE := ("generator after the callbacks", "state after the callbacks")),
)
"""In the order in which a step makes them, so that the first difference is next to its cause."""
OF_SAME_RANKS = ("generator before the step", "generator after the callbacks")
OF_PASSES = ("sample", "generator in the pass", "losses")
KEYED = ("generator before the step", "torch")  # set anew in each pass

Row = dict[str, Any]


@dataclass(frozen=True)
class RecordDifference:
    """The first tensor that differs, and what is known of the operators of the step."""

    stage: str
    tensor: str
    ranks: tuple[int, ...]
    number: int | None
    digests: tuple[str, str]
    values: str
    others: int
    operators: OperatorSearch | None
    are_of_next: bool = False
    """Whether `operators` are those of the next step, the first that reads what is wrong."""

    @property
    def wants_reader(self) -> bool:
        """Whether it came up after the update, so that the next step is the first to read it."""
        search = self.operators
        is_named = search is not None and bool(search.name or search.reader)
        return self.stage in AFTER_UPDATE and not is_named

    def read_by(self, following: RecordDifference) -> RecordDifference:
        """The same with the operators of the step that follows."""
        return replace(self, operators=following.operators, are_of_next=True)

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "pass": self.number}

    def __str__(self) -> str:
        where = f" of pass {self.number}" * (self.stage in OF_PASSES)
        ranks = ", ".join(map(str, self.ranks))
        on = f" on rank{'s' * (len(self.ranks) > 1)} {ranks}" if self.ranks else ""
        lines = [f"first: {self.stage}{where}, {self.tensor or 'all'}{on}"]
        lines.append(f"  digest {self.digests[0]}, and {self.digests[1]}")
        if self.values:
            lines.append(f"  {self.values}")
        if self.others:
            lines.append(f"  and {self.others} other tensors of this stage")
        if self.operators is not None:
            lines += self._operators_in_words(self.operators)
        return "\n".join(lines)

    def _operators_in_words(self, search: OperatorSearch) -> list[str]:
        if search.name:
            return str(search).splitlines()
        if search.reader:
            step = ", in the next step" * self.are_of_next
            return [f"first operator with other inputs{step}: {search.reader}"]
        alone = f"; without a counterpart: {search.unmatched}" * bool(search.unmatched)
        return [f"operators: all that were recorded agree{alone}"]


class StepSide:
    """The record of one side: rows by stage and tensor, of each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("rank-*.json"))
        self.rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for rank, file in enumerate(self.files):
            for number, row in enumerate(json.loads(file.read_text())):
                key = row["stage"], row["tensor"].removeprefix("common/")
                self.rows[key].append({**row, "rank": rank, "number": number})

    def value(self, row: Row) -> Any:
        """The tensor of a row; `None` if it was too large to be written."""
        path = self.files[row["rank"]].with_suffix(".safetensors")
        return load_file(path).get(str(row["number"]))


def compare_step(first: Path, second: Path) -> RecordDifference | None:
    """The first difference of the second record from the first; `None` if there is none."""
    ours, theirs = StepSide(second), StepSide(first)
    for stage in STAGES:
        names = [name for at, name in ours.rows if at == stage and (at, name) in theirs.rows]
        if stage in OF_SAME_RANKS:
            is_alike = len(ours.files) == len(theirs.files)
            names = [name for name in names if is_alike and (stage, name) != KEYED]
        pairs = ((name, _unequal(ours, theirs, (stage, name))) for name in names)
        wrong = [(name, *pair) for name, pair in pairs if pair is not None]
        if wrong:
            name, row, other, ranks = min(wrong, key=lambda each: each[1]["pass"] or 0)
            return RecordDifference(
                stage=stage,
                tensor=name,
                ranks=() if "gradient" in stage else ranks,  # it is the sum of all ranks
                number=row["pass"],
                digests=(f"{other['digest']:016x}", f"{row['digest']:016x}"),
                values=_in_words(theirs.value(other), ours.value(row)),
                others=len(wrong) - 1,
                operators=_operators(second, first),
            )
    return None


def _operators(ours: Path, theirs: Path) -> OperatorSearch | None:
    if not all(any((side / OPERATORS).glob("*.json")) for side in (ours, theirs)):
        return None
    return compare_operators(ours / OPERATORS, theirs / OPERATORS, 0.0, is_exact=True)


def _unequal(
    ours: StepSide, theirs: StepSide, key: tuple[str, str]
) -> tuple[Row, Row, tuple[int, ...]] | None:
    """A row of each side that differ, and the ranks of ours where they do."""
    a, b = ours.rows[key], theirs.rows[key]
    if a[0]["pass"] is not None:
        pairs = zip(a, b, strict=True) if len(a) == len(b) else ()
        for row, other in pairs:
            if row["digest"] != other["digest"]:
                return row, other, (row["rank"],)
        return None
    by_box = [_by_box(side) for side in (a, b)]
    for box, rows in by_box[0].items():  # of ranks that hold the same part, each may differ
        other = by_box[1].get(box, rows)[0]
        wrong = [row for row in rows if row["digest"] != other["digest"]]
        if wrong:
            ranks = tuple(row["rank"] for row in wrong)
            return wrong[0], other, ranks if len(ranks) < len(ours.files) else ()
    sums = [sum(rows[0]["digest"] for rows in side.values()) & MASK for side in by_box]
    if sums[0] == sums[1]:
        return None
    return ({**a[0], "digest": sums[0]}, {**b[0], "digest": sums[1]}, ())


def _by_box(rows: list[Row]) -> dict[str, list[Row]]:
    boxes: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        boxes[str(row["box"])].append(row)
    return boxes


def _in_words(was: Any, now: Any) -> str:
    """The first element that differs, and its values; "" where the parts are not the same."""
    if was is None or now is None or was.shape != now.shape:
        return ""
    a, b = was.ravel(), now.ravel()
    kind = np.dtype(f"u{a.itemsize}")
    places = np.flatnonzero(a.view(kind) != b.view(kind))
    if not len(places):
        return ""
    place = int(places[0])
    index = [int(i) for i in np.unravel_index(place, was.shape)]
    return f"{len(places)} of {a.size} values differ, first {index}: {a[place]}, and {b[place]}"
