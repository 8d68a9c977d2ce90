"""How far a run on many ranks comes from one process, step by step: measured, and not judged."""

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

    `weights` is the length of the difference between the weights of both, as a part of how far
    those of one process have come from the start.
    """

    step: int
    loss: float
    loss_of_one: float
    weights: float


@dataclass(frozen=True)
class Drift:
    """The drift of a strategy as it was asked for; `exact_at` is where it was checked."""

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
                    "step": one.step,
                    "loss": one.loss,
                    "loss_of_one_process": one.loss_of_one,
                    "weights_apart": one.weights,
                }
                for one in self.steps
            ],
        }

    def __str__(self) -> str:
        where = f"{self.ranks} ranks, {self.precision}"
        lines = [f"drift of {self.strategy} on {where}, which decides nothing: {COMPARED}"]
        every = max(1, math.ceil(len(self.steps) / SHOWN))
        shown = [one for one in self.steps if one.step % every == 0 or one is self.steps[-1]]
        lines += [
            f"  step {one.step}: loss {one.loss:.6g}, of one process {one.loss_of_one:.6g}; "
            f"weights {one.weights:.2g} of the way apart"
            for one in shown
        ]
        return "\n".join(lines)


COMPARED = (
    "the weights that rank 0 holds and the loss over all ranks, beside one process, both from the "
    "same start and then freely"
)


def drift_between(
    one: RecordedTrace, many: RecordedTrace, job: Job, exact_at: str | None, promise: str
) -> Drift:
    """The drift after each step that both have made."""
    start, found = _weights(one.start), []
    for step in one.steps:
        if step < 0 or step not in many.ranks[0]:
            continue
        theirs, ours = _weights(one.tensors(step)), _weights(many.tensors(step))
        names = start.keys() & theirs.keys() & ours.keys()
        way = math.hypot(*(norm(theirs[name] - start[name]) for name in names))
        apart = math.hypot(*(norm(ours[name] - theirs[name]) for name in names))
        losses = _loss(many, step), _loss(one, step)
        found.append(WeightDrift(step, *losses, apart / way if way else 0.0))
    return Drift(job.strategy, job.ranks, job.precision, tuple(found), exact_at, promise)


def _loss(trace: RecordedTrace, step: int) -> float:
    """Over all ranks: learners tell their own between two meetings."""
    rows = [rank[step] for rank in trace.ranks if step in rank]
    weights = [float(row["weight"]) for row in rows]
    told = [float(row["loss"]) * weight for row, weight in zip(rows, weights, strict=True)]
    return math.fsum(told) / (math.fsum(weights) or 1.0)


def _weights(tensors: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("weight/")}
