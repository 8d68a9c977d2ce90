"""The drift of a run on many ranks from one process, step by step: measured, not judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from allranks.job.job import Job
from allranks.tools.check.compare import RecordedTrace
from allranks.tools.check.sizes import norm

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
