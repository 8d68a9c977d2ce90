"""The result of a check: of each look, and of all of them together."""

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
    """Whether one process alone gives two results, depending on how its batches are cut."""
    promised: bool = True
    """Whether the job promises this equality; without `bitwise` it does not promise equal bits."""

    cause: ConfirmedCause | None = None
    """The cause, if one was confirmed."""

    @property
    def first(self) -> Difference | None:
        """The first difference, if any."""
        return self.comparison.first or self.evaluation

    @property
    def where(self) -> str:
        """The ranks and the precision, in words."""
        where = "one process" if self.one_process else f"{self.ranks} ranks"
        where = "1 rank" if where == "1 ranks" else where
        return f"{where}, {self.precision}{', bitwise' if self.bitwise else ''}"


@dataclass(frozen=True)
class Verdict:
    """The result of a check, and what it could not compare."""

    program: str
    strategy: str
    looks: tuple[Look, ...]
    not_checked: tuple[str, ...] = ()
    drift: Drift | None = None
    """For a strategy that does not promise the result of one process: its distance from it."""

    @property
    def equal(self) -> bool | None:
        """Whether the job has the result of one process, as far as compared; `None`: unknown.

        For an approximate strategy: at the exact setting of its card (`drift.exact_at`).
        """
        if not self.looks:
            return None
        return all(look.first is None for look in self.looks if look.promised)

    @property
    def deciding(self) -> Look:
        """The look with a difference, preferably one with a cause; else the last look.

        Raises `IndexError` if nothing was decided (`equal` is `None`).
        """
        promised = [look for look in self.looks if look.promised]
        differ = [look for look in promised if look.first is not None]
        return next((look for look in differ if look.cause is not None), (*differ, promised[-1])[0])

    @property
    def first(self) -> Difference | None:
        """The first difference, if any."""
        return self.deciding.first if self.looks else None

    def to_data(self) -> dict[str, Any]:
        """The verdict as a mapping that JSON can carry, with the numbers of the deciding look."""
        return {
            "equal": self.equal,
            "program": self.program,
            "strategy": self.strategy,
            **(_data_of(self.deciding) if self.looks else {}),
            "looks": [_data_of(look) for look in self.looks],
            "not_checked": list(self.not_checked),
            "drift": None if self.drift is None else self.drift.to_data(),
        }

    def __str__(self) -> str:
        """What a person reads."""
        lines = self._looks_in_words() if self.looks else [f"not decided: {self._subject}"]
        lines += [] if self.drift is None else [str(self.drift)]
        return "\n".join([*lines, "not checked: " + "; ".join(self.not_checked)])

    @property
    def _subject(self) -> str:
        exact_at = None if self.drift is None else self.drift.exact_at
        return f"{self.program} under {exact_at or self.strategy}"

    def _looks_in_words(self) -> list[str]:
        deciding, lines, subject = self.deciding, list[str](), self._subject
        if deciding.first is None:
            lines.append(f"equal: {subject}")
        elif deciding.one_process:
            lines += [f"different: {subject}, {deciding.where}, with itself", ONE_PROCESS]
        else:
            lines.append(f"different: {subject} on {deciding.where}")
        if deciding.first is not None:
            lines.append(str(deciding.first) if deciding.cause is None else deciding.first.where)
            lines += [] if deciding.cause is None else [str(deciding.cause)]
        others = (look for look in self.looks if look is not deciding or look.first is None)
        return [*lines, *map(_line_of, others)]


ONE_PROCESS = (
    "one process gives two answers, as its batches are cut: samples that depend on each other, "
    "random numbers that the engine cannot see, or padding that follows the batch"
)


def _line_of(look: Look) -> str:
    comparison = look.comparison
    if look.first is not None and look.promised:
        return f"  {look.where}: different, too: {str(look.first).splitlines()[0]}"
    if look.first is not None:
        words = str(look.first).splitlines()[0]
        return f"  {look.where}: NOT {EQUAL_BITS}, which the job does not ask for: {words}"
    limit = EQUAL_BITS if look.tolerance.exact else f"within {look.tolerance.tensors:.1e}"
    line = f"  {look.where}: {comparison.steps} steps, {limit}"
    if look.tolerance.exact:
        return line
    if not comparison.largest:
        return f"{line}; no difference"
    return f"{line}; largest difference {comparison.largest:.1e} ({comparison.largest_at})"


def _data_of(look: Look) -> dict[str, Any]:
    first = look.first
    return {
        "ranks": look.ranks,
        "precision": look.precision,
        "bitwise": look.bitwise,
        "asked": look.promised,
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
            "found": first.text,
            "hint": first.hint,
        },
        "cause": None if look.cause is None else look.cause.to_data(),
    }
