"""Weights, their average and buffers that are wrong, of equal gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from allranks.tools.check.causes.cause import (
    Account,
    CauseTable,
    Evidence,
    ShardPart,
)
from allranks.tools.check.sizes import Array
from allranks.training.record.trace import START

CAUSES = CauseTable()

# --- starts --------------------------------------------------------------------------------------
# Weights that differ before the first step.


@CAUSES.row(
    "parts of rank 0",
    "weight",
    do="give each rank the part that belongs to it: rows [rank · n, (rank + 1) · n)",
)
def parts_of_the_first(evidence: Evidence) -> Iterator[Account]:
    """Every rank begins with the part of rank 0 instead of its own."""
    if evidence.step != START:
        return
    ours, wanted = evidence.actual(evidence.stage), evidence.wanted(evidence.stage)
    repaired = {}
    for name in evidence.differing:
        actual = ours[name].copy()
        for axis in range(actual.ndim):
            rows = -(-actual.shape[axis] // evidence.ranks)
            first = np.take(wanted[name], range(min(rows, actual.shape[axis])), axis)
            tiled = np.concatenate([first] * evidence.ranks, axis)
            tiled = np.take(tiled, range(actual.shape[axis]), axis)
            if np.array_equal(actual, tiled):
                repaired[name] = actual - tiled + wanted[name]
                break
    if evidence.differing and len(repaired) == len(evidence.differing):
        says = "every rank begins with the part of a weight that belongs to rank 0"
        yield Account(says, repaired, None, tuple(range(1, evidence.ranks)))


@CAUSES.row(
    "weights not sent",
    "weight",
    "buffer",
    do="broadcast weights and buffers from rank 0 once, before the optimizer is made",
)
def not_sent_at_the_start(evidence: Evidence) -> Iterator[Account]:
    """Some ranks begin with other weights: only those of the right ranks match one process."""
    if evidence.step != START or len(evidence.tensors_of_ranks) < 2:
        return
    wrong = [
        rank
        for rank in range(evidence.ranks)
        if evidence.beyond(evidence.actual(evidence.stage, rank))
    ]
    right = [rank for rank in range(evidence.ranks) if rank not in wrong]
    if right and wrong:
        tensors = evidence.actual(evidence.stage, right[0])
        repaired = {name: tensors[name] for name in evidence.differing if name in tensors}
        says = f"ranks {wrong} begin with weights of their own: those of rank 0 were not sent"
        yield Account(says, repaired, None, tuple(wrong))


# --- updates -------------------------------------------------------------------------------------
# Updates of equal gradients that are not those of one process, and their average.


def _steps(evidence: Evidence) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """For tensors that differ: their value before, the job's update, and that of one process."""
    stage = evidence.stage
    before, ours, wanted = evidence.before(stage), evidence.actual(stage), evidence.wanted(stage)
    names = evidence.differing
    if not set(names) <= before.keys():
        return {}, {}, {}
    return (
        {n: before[n] for n in names},
        {n: ours[n] - before[n] for n in names},
        {n: wanted[n] - before[n] for n in names},
    )


@CAUSES.row(
    "update not sent",
    "weight",
    do="send updated weights from their owner to all ranks after the step",
)
def not_sent(evidence: Evidence) -> Iterator[Account]:
    """The owner of a weight has its update, and others go on with the old weight."""
    names, before = evidence.differing, evidence.before(evidence.stage)
    for owner in range(len(evidence.tensors_of_ranks)):
        owned = evidence.actual(evidence.stage, owner)
        right = all(n in owned and evidence.size(n, owned[n]) <= evidence.limit(n) for n in names)
        if names and right:
            others = [r for r in range(evidence.ranks) if r != owner]
            each = [evidence.actual(evidence.stage, r) for r in others]
            stale = [
                rank
                for rank, tensors in zip(others, each, strict=True)
                if any(
                    n in tensors and n in before and np.array_equal(tensors[n], before[n])
                    for n in names
                )
            ]
            if stale:
                says = f"the update that rank {owner} makes does not reach ranks {stale}"
                yield Account(says, {n: owned[n] for n in names}, None, tuple(stale))


@CAUSES.row("update lost", "weight", do="give the optimizer these weights")
def lost(evidence: Evidence) -> Iterator[Account]:
    """The weight is as it was before the step."""
    if any(name in evidence.wanted("gradient") for name in evidence.differing):
        words = "weights are not updated at all, and stay as they were before the step"
        yield from _unchanged(evidence, words)


@CAUSES.row(
    "weight written by the model",
    "weight",
    do="move a weight that is not trained, such as a teacher's, in on_step of a callback",
)
def not_written(evidence: Evidence) -> Iterator[Account]:
    """A weight without a gradient, which forward or loss should write, is unchanged."""
    if not any(name in evidence.wanted("gradient") for name in evidence.differing):
        words = "weights without a gradient are written in one process, in forward or loss, and "
        yield from _unchanged(evidence, f"{words}stay as they were here")


def _unchanged(evidence: Evidence, says: str) -> Iterator[Account]:
    before, ours, wanted = _steps(evidence)
    if before and not any(np.any(step) for step in ours.values()):
        yield Account(says, {n: before[n] + ours[n] + wanted[n] for n in before}, 0.0)


@CAUSES.row("decay of each rank", "weight", do="decay weights once for each step")
def decayed_by_each(evidence: Evidence) -> Iterator[Account]:
    """Weight decay is applied as often as there are ranks."""
    before, ours, _ = _steps(evidence)
    decay = evidence.facts.get("settings", {}).get("weight_decay")
    rate = evidence.row().get("learning_rate")
    if not before or not decay or not rate:
        return
    factor = 1 - rate * decay
    for axis, size in evidence.axes.items():
        often = f"{size} times, once for each of {evidence.words_of(axis)}"
        for more in (factor**size - factor, -(size - 1) * rate * decay):
            repaired = {n: before[n] + ours[n] - more * before[n] for n in before}
            yield Account(f"weight decay is applied {often}", repaired, float(size))


@CAUSES.row(
    "optimizer state lost",
    "weight",
    do="keep, save and restore what the optimizer keeps for each weight",
)
def fresh_state(evidence: Evidence) -> Iterator[Account]:
    """The optimizer has lost its state: this update is like a first one."""
    before, ours, wanted = _steps(evidence)
    settings, rate = evidence.facts.get("settings", {}), evidence.row().get("learning_rate")
    name = evidence.facts.get("optimizer")
    if not before or not rate or evidence.step == 0:
        return
    clipped = evidence.wanted("clipped gradient") or evidence.wanted("gradient")
    decay, eps = settings.get("weight_decay", 0.0), settings.get("eps", 0.0)
    repaired = {}
    for tensor, weight in before.items():
        if tensor not in clipped:
            return
        g = clipped[tensor]
        if name == "AdamW":
            first = -rate * decay * weight - rate * g / (np.abs(g) + eps)
        elif name == "Adam":
            g = g + decay * weight
            first = -rate * g / (np.abs(g) + eps)
        elif name == "SGD":
            g = g + decay * weight
            first = -rate * (
                g * (1 + settings.get("momentum", 0.0)) if settings.get("nesterov") else g
            )
        else:
            return
        repaired[tensor] = weight + ours[tensor] - first + wanted[tensor]
    says = f"{name} has lost what it keeps from step to step: this update is as a first one"
    yield Account(says, repaired)


@CAUSES.row(
    "step times ranks",
    "weight",
    do="leave the rate as it is: the batch belongs to the job, not to a rank",
)
def times_ranks(evidence: Evidence) -> Iterator[Account]:
    """All of the step is times the ranks, or one over them."""
    for axis, factor, repaired in _times_an_axis(evidence):
        says = f"every step of the weights is times {factor:g}, for {evidence.words_of(axis)}"
        yield Account(says, repaired, factor)


def _times_an_axis(evidence: Evidence) -> Iterator[tuple[str, float, dict[str, Array]]]:
    """Axes by whose size the whole step is too large or too small; with the repaired weights."""
    before, ours, wanted = _steps(evidence)
    dot = sum(float((ours[n] * wanted[n]).sum()) for n in before)
    square = sum(float((wanted[n] * wanted[n]).sum()) for n in before)
    for axis, size in evidence.axes.items() if square else ():
        for factor in (float(size), 1 / size):
            if abs(dot / square / factor - 1) < 1e-3:
                yield axis, factor, {n: before[n] + ours[n] / factor for n in before}


@CAUSES.row("average of each rank", "average", do="take the decay as it is, once for each step")
def other_decay(evidence: Evidence) -> Iterator[Account]:
    """The average takes more or less of the new weight, by the number of ranks."""
    for axis, factor, repaired in _times_an_axis(evidence):
        says = f"the average takes {factor:g} times as much of the new weights as it should,"
        size = evidence.axes[axis]
        yield Account(f"{says} for the {size} ranks along {axis!r}", repaired, factor)


@CAUSES.row("average before the step", "average", do="take the average after the optimizer's step")
def averaged_before(evidence: Evidence) -> Iterator[Account]:
    """The average takes in the weights as they were before the update."""
    before, ours, wanted = _steps(evidence)
    decay, weights = evidence.facts.get("ema"), evidence.before("weight")
    if not before or decay is None or not set(before) <= weights.keys():
        return
    added = {n: (1 - decay) * (weights[n] - before[n]) for n in before}
    repaired = {n: before[n] + ours[n] - added[n] + wanted[n] for n in before}
    yield Account("the average takes in weights before the update, one step too early", repaired)


# --- buffers -------------------------------------------------------------------------------------
# Running statistics of BatchNorm that are those of some samples, or updated too often.


KINDS = ("running_mean", "running_var")


def _moment(parts: Iterable[ShardPart], name: str) -> Array | None:
    """The mean or the variance that a statistic follows over these parts, if they have it."""
    layer, _, kind = name.rpartition(".")
    moments = [part.tensors[key] for part in parts if (key := f"moments/{layer}") in part.tensors]
    total = np.asarray(sum(moments), np.float64)
    if not moments or total[0] <= 0:
        return None
    return np.split(total[1:] / total[0], 2)[KINDS.index(kind)]


def _statistics(evidence: Evidence) -> tuple[str, ...]:
    return tuple(n for n in evidence.differing if n.rpartition(".")[2] in KINDS)


@CAUSES.row(
    "statistics of one rank",
    "buffer",
    do="sum the moments of all ranks before running statistics are updated",
)
def of_one_rank(evidence: Evidence) -> Iterator[Account]:
    """They are updated with what one rank has seen."""
    parts, names = evidence.parts, _statistics(evidence)
    if parts is None or not names or len(parts.by_rank) < 2:
        return
    ours = evidence.actual("buffer")
    for rank, pieces in parts.by_rank.items():
        repaired = {}
        for name in names:
            whole, part = _moment(parts.each, name), _moment(pieces, name)
            rate = _rate(evidence, name, whole)
            if whole is not None and part is not None and rate is not None:
                repaired[name] = ours[name] - rate * (part - whole)
        if len(repaired) == len(names):
            says = f"BatchNorm's running statistics are those of what rank {rank} has seen"
            yield Account(says, repaired, ranks=(rank,), tensors=names)


@CAUSES.row("statistics updated twice", "buffer", do="update running statistics once for each step")
def updated_twice(evidence: Evidence) -> Iterator[Account]:
    """They are updated several times in a step, once for each pass or rank."""
    parts, names = evidence.parts, _statistics(evidence)
    if parts is None or not names:
        return
    ours, before = evidence.actual("buffer"), evidence.before("buffer")
    for times in sorted({2, evidence.ranks, len(parts.by_micro)} - {1}):
        repaired = {}
        for name in names:
            mean = _moment(parts.each, name)
            rate = _rate(evidence, name, mean)
            if mean is not None and rate is not None:
                often = 1 - (1 - rate) ** times
                repaired[name] = ours[name] - (often - rate) * (mean - before[name])
        if len(repaired) == len(names):
            says = f"BatchNorm's running statistics are updated {times} times in one step"
            yield Account(says, repaired, float(times), tensors=names)


def _rate(evidence: Evidence, name: str, mean: Array | None) -> float | None:
    """How far one process goes from its statistic to that of the step; `None` if unknown."""
    before, after = evidence.before("buffer").get(name), evidence.wanted("buffer")[name]
    if before is None or mean is None:
        return None
    way = (mean - before).astype(np.float64).ravel()
    square = float(way @ way)
    return float((after - before).astype(np.float64).ravel() @ way) / square if square else 0.0
