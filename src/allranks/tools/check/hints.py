"""The usual reason for a difference: one line for each kind that has been met."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from allranks.tools.check.sizes import Array, norm

BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")
BATCHNORM_OF_KERAS = ("moving_mean", "moving_variance")
NUMBERS = {
    "samples": "samples counted twice or lost",
    "learning rate": "a schedule that is stepped by each rank",
    "gradient norm": "a norm of one rank, or taken at another moment",
    "overflow": "one run skipped this step: its gradient, or its loss scale, is another",
}
DRIFTS = {
    "gradient": "a gradient that is not summed over the ranks: zero_grad() in forward or loss, a "
    "layer unfrozen on the way, or a hook that acts on one rank",
    "weight": "each rank updates by itself: an optimizer or callback that draws or counts on its "
    "own, or a weight that the model writes in forward",
    "average": "each rank averages by itself",
}
MEAN_OF_MEANS = (
    "a mean of means with uneven counts, or gradients changed before they were summed (a hook, a "
    "function that scales by its batch)"
)


def of_number(stage: str, row: Mapping[str, Any]) -> str:
    """For a number of a step; `row` is the candidate's record of that step."""
    if stage == "weight":
        return (
            "the number of loss values follows how the batch is cut, as with padding and no "
            "weight(batch); or weights counted twice or lost"
        )
    if stage != "loss":
        return NUMBERS.get(stage, "an evaluation of other weights, or of other samples")
    hint = "other random numbers, or samples that depend on each other: the weights are the same"
    if row.get("draws"):
        hint += "; forward or loss draws from torch's generator in a way that is not keyed "
        hint += "(torch.poisson, C++, or by function where ranks hold stages or parts), so the "
        hint += "numbers follow the micro-batch"
    return hint


def of_buffer(tensor: str) -> str:
    """For a buffer: those of BatchNorm are the engine's, the others the model's own."""
    if tensor.rpartition(".")[2] == BATCHNORM[2]:
        return "BatchNorm counted a step more than once, or not at all"
    if tensor.rpartition(".")[2] in BATCHNORM or tensor.endswith(BATCHNORM_OF_KERAS):
        return "BatchNorm statistics of one rank only, or updated more than once"
    return "a buffer that the model writes itself: it follows the samples that a rank sees"


def of_update(stage: str, ours: Array, theirs: Array, before: Array | None) -> str:
    """For a weight or its average: the gradients of the step were equal.

    `before` is `None` for the first weights.
    """
    if before is None and stage == "weight":
        return (
            "other first weights: written in optimizer(model), by a hook or a thread, or drawn "
            "from a generator that is not torch's"
        )
    if before is not None and before.shape == theirs.shape and stage == "weight":
        if np.array_equal(ours, before):
            return "an update that was lost: the weight is as it was"
        if np.array_equal(theirs, before):
            return "an update that one process does not make"
    if stage == "average":
        return "an average that was taken at another moment, or with another decay"
    return (
        "an update made with another gradient, or by an optimizer or callback that draws or "
        "counts on its own"
    )


def of_gradient(ours: Array, theirs: Array, ranks: int, everywhere: bool) -> str:
    """For a gradient: a factor, or something less regular."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "values that are not finite in one of the two runs"
    norms = norm(a) * norm(b)
    if norms == 0:
        return "a gradient that was lost, or that one process does not have"
    ratio, cosine = float(a @ b) / norm(b) ** 2, float(a @ b) / norms
    if cosine > 1 - 1e-6:
        for factor, name in (
            (ranks, "a sum where the mean is wanted"),
            (1 / ranks, "divided twice"),
        ):
            if ranks > 1 and abs(ratio / factor - 1) < 1e-3:
                return f"{name} (every value times {ratio:.4g})"
        return f"scaled by {ratio:.6g}: a weight, a clip or a norm of one rank"
    return (
        MEAN_OF_MEANS
        if everywhere
        else "some parameters not summed, or sent before they were finished"
    )


def of_samples(ids: list[int], wanted: list[int]) -> tuple[str, str]:
    """How the samples of a step differ, and the hint."""
    missing, extra = set(wanted) - set(ids), set(ids) - set(wanted)
    text = f"{len(missing)} samples missing, {len(extra)} not of this batch"
    if len(ids) != len(set(ids)):
        twice = len(ids) - len(set(ids))
        return f"{twice} samples twice, {text}", "ranks read the same data"
    if not missing and not extra:
        return "the same samples in another order", "shards in another order"
    return text, "a sampler that shares the data out wrongly"
