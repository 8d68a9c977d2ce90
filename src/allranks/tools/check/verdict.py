"""What a check found: in each look that it took, and in all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allranks.tools.check.causes.cause import ConfirmedCause
from allranks.tools.check.compare import Comparison, Difference, Tolerance
from allranks.tools.check.drift import Drift

EQUAL_BITS = "equal bits"


@dataclass(frozen=True)
class Look:
    """One comparison of a job with one process: on so many ranks, in one precision."""

    ranks: int
    precision: str
    bitwise: bool
    comparison: Comparison
    tolerance: Tolerance
    evaluation: Difference | None = None
    """How the evaluations, or the digests of the weights, at the end differ."""
    one_process: bool = False
    """Whether one process gives two answers: when its batches are cut, whatever the ranks do."""
    asked: bool = True
    """Whether the job promises what was looked at; equal bits it does not without `bitwise`."""

    cause: ConfirmedCause | None = None
    """Why, if that was confirmed."""

    @property
    def first(self) -> Difference | None:
        """The first difference, if any."""
        return self.comparison.first or self.evaluation

    @property
    def what(self) -> str:
        """Where was looked."""
        where = "one process" if self.one_process else f"{self.ranks} ranks"
        where = "1 rank" if where == "1 ranks" else where
        return f"{where}, {self.precision}{', bitwise' if self.bitwise else ''}"


@dataclass(frozen=True)
class Verdict:
    """What a check found, and what it could not look at."""

    program: str
    strategy: str
    looks: tuple[Look, ...]
    not_checked: tuple[str, ...] = ()
    drift: Drift | None = None
    """Of a strategy that does not promise what one process gives: how far it comes from it."""

    @property
    def equal(self) -> bool | None:
        """Whether the job has the result of one process, as far as was looked; `None`: unknown.

        Of an approximate strategy, at the setting at which its card says so (`drift.exact_at`).
        """
        if not self.looks:
            return None
        return all(look.first is None for look in self.looks if look.asked)

    @property
    def deciding(self) -> Look:
        """The look that found a difference, one with a cause first; else the last one.

        There is none where nothing was decided (`equal` is `None`).
        """
        asked = [look for look in self.looks if look.asked]
        differ = [look for look in asked if look.first is not None]
        return next((look for look in differ if look.cause is not None), (*differ, asked[-1])[0])

    @property
    def first(self) -> Difference | None:
        """The first difference, if any."""
        return self.deciding.first if self.looks else None

    def to_data(self) -> dict[str, Any]:
        """The verdict as a mapping that JSON can carry; the numbers are those of what decided."""
        return {
            "equal": self.equal,
            "program": self.program,
            "strategy": self.strategy,
            **(_data_of(self.deciding) if self.looks else {}),
            "looks": [_data_of(one) for one in self.looks],
            "not_checked": list(self.not_checked),
            "drift": None if self.drift is None else self.drift.to_data(),
        }

    def __str__(self) -> str:
        """What a person reads."""
        lines = self._looks_in_words() if self.looks else [f"not decided: {self._what}"]
        lines += [] if self.drift is None else [str(self.drift)]
        return "\n".join([*lines, "not checked: " + "; ".join(self.not_checked)])

    @property
    def _what(self) -> str:
        exact_at = None if self.drift is None else self.drift.exact_at
        return f"{self.program} under {exact_at or self.strategy}"

    def _looks_in_words(self) -> list[str]:
        look, lines, what = self.deciding, list[str](), self._what
        if look.first is None:
            lines.append(f"equal: {what}")
        elif look.one_process:
            lines += [f"different: {what}, {look.what}, with itself", ONE_PROCESS]
        else:
            lines.append(f"different: {what} on {look.what}")
        if look.first is not None:
            lines.append(str(look.first) if look.cause is None else look.first.where)
            lines += [] if look.cause is None else [str(look.cause)]
        return lines + [_line_of(one) for one in self.looks if one is not look or one.first is None]


ONE_PROCESS = (
    "one process gives two answers, as its batches are cut: samples that depend on each other, "
    "random numbers that the engine cannot see, or padding that follows the batch"
)


def _line_of(look: Look) -> str:
    found = look.comparison
    if look.first is not None and look.asked:
        return f"  {look.what}: different, too: {str(look.first).splitlines()[0]}"
    if look.first is not None:
        words = str(look.first).splitlines()[0]
        return f"  {look.what}: NOT {EQUAL_BITS}, which the job does not ask for: {words}"
    limit = EQUAL_BITS if look.tolerance.exact else f"within {look.tolerance.tensors:.1e}"
    line = f"  {look.what}: {found.steps} steps, {limit}"
    if look.tolerance.exact:
        return line
    if not found.largest:
        return f"{line}; no difference"
    return f"{line}; largest difference {found.largest:.1e} ({found.largest_at})"


def _data_of(look: Look) -> dict[str, Any]:
    first = look.first
    return {
        "ranks": look.ranks,
        "precision": look.precision,
        "bitwise": look.bitwise,
        "asked": look.asked,
        "steps": look.comparison.steps,
        "tolerance": look.tolerance.tensors,
        "largest_difference": look.comparison.largest,
        "one_process": look.one_process,
        "evaluation_equal": look.evaluation is None,
        "first_difference": None
        if first is None
        else {
            "step": first.step,
            "stage": first.stage,
            "tensor": first.tensor,
            "size": first.size,
            "found": first.found,
            "hint": first.hint,
        },
        "cause": None if look.cause is None else look.cause.to_data(),
    }
