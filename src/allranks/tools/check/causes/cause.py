"""A cause: a pattern of differences, with the repair that must make them vanish.

A pattern reads the evidence and gives accounts: what was done, in words, with the numbers of the
job as they are once it is undone. An account whose repaired numbers are those of one process, all
of the stage within the tolerance of the look, is confirmed. What is not confirmed is not said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allranks.tools.check.causes.evidence import NUMBERS, Evidence
from allranks.tools.check.sizes import Array, number_difference

NUMBER = ""
"""The name under which a repaired number stands."""
VANISHED = 1 / 20
"""Of what a difference was, this may be left of it at most."""


@dataclass(frozen=True)
class Account:
    """What would explain a difference: `repaired` are the job's numbers with the fault undone.

    Tensors by name, or one number under `NUMBER`. `ratio` is what a right value was times, `ranks`
    those whose numbers show it, `tensors` those that the fault is in (all that differ, if empty).
    """

    says: str
    repaired: Mapping[str, Array | float]
    ratio: float | None = None
    ranks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    limit: float | None = None
    """How close the repaired numbers must come, where that is not the tolerance of the look."""


Pattern = Callable[[Evidence], Iterator[Account]]


@dataclass(frozen=True)
class Cause:
    """One row of the table: where it can be first seen, its pattern, and what to do about it."""

    name: str
    stages: tuple[str, ...]
    pattern: Pattern
    do: str


@dataclass(frozen=True)
class Finding:
    """A cause that was confirmed; `left` is the largest difference once it is undone."""

    cause: str
    says: str
    do: str
    ratio: float | None
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    left: float
    limit: float
    or_else: tuple[str, ...] = field(default=())
    """Other causes that explain the same numbers as well."""

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        return {
            "name": self.cause,
            "says": self.says,
            "confirmed": True,
            "evidence": {
                "ratio": self.ratio,
                "ranks": list(self.ranks),
                "tensors": list(self.tensors),
                "left_after_repair": self.left,
                "tolerance": self.limit,
            },
            "or_else": list(self.or_else),
            "do": self.do,
        }

    def __str__(self) -> str:
        lines = [f"cause: {self.says}"]
        lines += [f"    or: {other}" for other in self.or_else]
        left = f"what is left is {self.left:.1e}, and {self.limit:.1e} is allowed"
        return "\n".join([*lines, f"confirmed: undone in the trace, {left}", f"do: {self.do}"])


def confirmed(cause: Cause, account: Account, evidence: Evidence) -> Finding | None:
    """What was found, if the difference vanishes with this repair.

    It must be within the tolerance of the look then, and a small part of what it was: a tolerance
    of 16 bits is wide enough for half of a difference.
    """
    if NUMBER in account.repaired:
        tensors: tuple[str, ...] = account.tensors
        key, floor = NUMBERS[evidence.stage], evidence.tolerance.floor
        wanted, before = evidence.wanted_row[key], evidence.row()[key]
        left = [number_difference(float(account.repaired[NUMBER]), wanted, floor)]
        was = [number_difference(before, wanted, floor)]
        limits = [evidence.tolerance.limit(evidence.first)]
    else:
        tensors = account.tensors or evidence.differing
        if not tensors or not set(tensors) <= account.repaired.keys():
            return None
        left = [evidence.size(name, np.asarray(account.repaired[name])) for name in tensors]
        was = [evidence.size_now(name) for name in tensors]
        limits = [evidence.limit(name) for name in tensors]
    if account.limit is None:
        limits = [min(limit, VANISHED * size) for limit, size in zip(limits, was, strict=True)]
    else:
        limits = [account.limit] * len(limits)
    if not all(size <= limit for size, limit in zip(left, limits, strict=True)):
        return None
    shown = account.ratio, account.ranks, tuple(tensors)
    return Finding(cause.name, account.says, cause.do, *shown, max(left), max(limits))
