"""The result of a check: of each look, and of all of them together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from allranks.job.job import Job
from allranks.tools.check.causes.cause import ConfirmedCause
from allranks.tools.check.compare import Comparison, Difference, RecordedTrace, Tolerance
from allranks.tools.check.operators import OperatorSearch
from allranks.tools.check.sizes import norm

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
    operators: OperatorSearch | None = None  # of a deep check, in the look that decides

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
            is_explained = deciding.cause or (deciding.operators and deciding.operators.name)
            lines.append(deciding.first.where if is_explained else str(deciding.first))
            lines += [] if deciding.cause is None else [str(deciding.cause)]
            lines.append(str(deciding.operators or "to name the operator: --deep"))
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
        "operators": None if look.operators is None else asdict(look.operators),
    }


# --- drift ---------------------------------------------------------------------------------------
# How far a run on many ranks is from one process, step by step: measured, not judged.


SHOWN = 6


@dataclass(frozen=True)
class WeightDrift:
    """After one step: both losses, and how far the weights are apart.

    `weights` is the norm of the difference between both weights, relative to the distance of the
    weights of one process from the start.
    """

    step: int
    loss: float
    loss_of_one: float
    weights: float


@dataclass(frozen=True)
class Drift:
    """The drift of a strategy; `exact_at` is the setting that was checked."""

    strategy: str
    ranks: int
    precision: str
    steps: tuple[WeightDrift, ...]
    exact_at: str | None
    promise: str

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "precision": self.precision,
            "promise": self.promise,
            "exact_at": self.exact_at,
            "compared": COMPARED,
            "steps": [
                {
                    "step": drift.step,
                    "loss": drift.loss,
                    "loss_of_one_process": drift.loss_of_one,
                    "weights_apart": drift.weights,
                }
                for drift in self.steps
            ],
        }

    def __str__(self) -> str:
        where = f"{self.ranks} ranks, {self.precision}"
        lines = [f"drift of {self.strategy} on {where}, which decides nothing: {COMPARED}"]
        every = max(1, math.ceil(len(self.steps) / SHOWN))
        shown = [d for d in self.steps if d.step % every == 0 or d is self.steps[-1]]
        lines += [
            f"  step {drift.step}: loss {drift.loss:.6g}, of one process {drift.loss_of_one:.6g}; "
            f"weights {drift.weights:.2g} of the way apart"
            for drift in shown
        ]
        return "\n".join(lines)


COMPARED = (
    "the weights that rank 0 holds and the loss over all ranks, beside one process, both from the "
    "same start and then freely"
)


def drift_between(
    single: RecordedTrace, many: RecordedTrace, job: Job, exact_at: str | None, promise: str
) -> Drift:
    """The drift after each step that both runs have."""
    start, drifts = _weights(single.start), []
    for step in single.steps:
        if step < 0 or step not in many.ranks[0]:
            continue
        theirs, ours = _weights(single.tensors(step)), _weights(many.tensors(step))
        names = start.keys() & theirs.keys() & ours.keys()
        way = math.hypot(*(norm(theirs[name] - start[name]) for name in names))
        distance = math.hypot(*(norm(ours[name] - theirs[name]) for name in names))
        losses = _loss(many, step), _loss(single, step)
        drifts.append(WeightDrift(step, *losses, distance / way if way else 0.0))
    return Drift(job.strategy, job.ranks, job.precision, tuple(drifts), exact_at, promise)


def _loss(trace: RecordedTrace, step: int) -> float:
    """The loss over all ranks: learners record their own between two merges."""
    rows = [rank[step] for rank in trace.ranks if step in rank]
    weights = [float(row["weight"]) for row in rows]
    losses = [float(row["loss"]) * weight for row, weight in zip(rows, weights, strict=True)]
    return math.fsum(losses) / (math.fsum(weights) or 1.0)


def _weights(tensors: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("weight/")}
