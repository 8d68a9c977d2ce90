"""Weights that another update has made of equal gradients, their average, and the rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from allranks.tools.check.causes.cause import NUMBER, Account, BatchParts, Evidence, ShardPart
from allranks.tools.check.sizes import Array

ADAMS = ("Adam", "AdamW")


def _steps(evidence: Evidence) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """For tensors that differ: their value before, the job's update, and that of one process."""
    stage = evidence.stage
    before, ours, wanted = evidence.before(stage), evidence.actual(stage), evidence.wanted(stage)
    names = [n for n in evidence.differing if n in before and n in ours and n in wanted]
    if len(names) != len(evidence.differing):
        return {}, {}, {}
    return (
        {n: before[n] for n in names},
        {n: ours[n] - before[n] for n in names},
        {n: wanted[n] - before[n] for n in names},
    )


def _ratio(a: Mapping[str, Array], b: Mapping[str, Array]) -> float | None:
    dot = sum(float((a[n] * b[n]).sum()) for n in a)
    square = sum(float((b[n] * b[n]).sum()) for n in a)
    return dot / square if square else None


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


def lost(evidence: Evidence) -> Iterator[Account]:
    """The weight is as it was before the step."""
    if any(name in evidence.wanted("gradient") for name in evidence.differing):
        yield from _unchanged(
            evidence, "weights are not updated at all, and stay as they were before the step"
        )


def not_written(evidence: Evidence) -> Iterator[Account]:
    """A weight without a gradient, which forward or loss should write, is unchanged."""
    if not any(name in evidence.wanted("gradient") for name in evidence.differing):
        yield from _unchanged(
            evidence,
            "weights without a gradient are written in one process, in forward or loss, and "
            "stay as they were here",
        )


def _unchanged(evidence: Evidence, says: str) -> Iterator[Account]:
    before, ours, wanted = _steps(evidence)
    if before and not any(np.any(step) for step in ours.values()):
        yield Account(says, {n: before[n] + ours[n] + wanted[n] for n in before}, 0.0)


def times_ranks(evidence: Evidence) -> Iterator[Account]:
    """All of the step is times the ranks, or one over them."""
    for axis, factor, repaired in _times_an_axis(evidence):
        says = f"every step of the weights is times {factor:g}, for {evidence.words_of(axis)}"
        yield Account(says, repaired, factor)


def _times_an_axis(evidence: Evidence) -> Iterator[tuple[str, float, dict[str, Array]]]:
    """Axes by whose size the whole step is too large or too small; with the repaired weights."""
    before, ours, wanted = _steps(evidence)
    ratio = _ratio(ours, wanted) if before else None
    if ratio is None:
        return
    for axis, size in evidence.axes.items():
        for factor in (float(size), 1 / size):
            if abs(ratio / factor - 1) < 1e-3:
                yield axis, factor, {n: before[n] + ours[n] / factor for n in before}


def decayed_by_each(evidence: Evidence) -> Iterator[Account]:
    """Weight decay is applied as often as there are ranks."""
    before, ours, _ = _steps(evidence)
    decay = evidence.facts.get("settings", {}).get("weight_decay")
    rate = evidence.row().get("learning_rate")
    if not before or not decay or not rate:
        return
    factor = 1 - rate * decay
    for axis, size in evidence.axes.items():
        for more in (factor**size - factor, -(size - 1) * rate * decay):
            repaired = {n: before[n] + ours[n] - more * before[n] for n in before}
            says = (
                f"weight decay is applied {size} times, once for each of {evidence.words_of(axis)}"
            )
            yield Account(says, repaired, float(size))


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


def other_decay(evidence: Evidence) -> Iterator[Account]:
    """The average takes more or less of the new weight, by the number of ranks."""
    for axis, factor, repaired in _times_an_axis(evidence):
        says = f"the average takes {factor:g} times as much of the new weights as it should,"
        size = evidence.axes[axis]
        yield Account(f"{says} for the {size} ranks along {axis!r}", repaired, factor)


def averaged_before(evidence: Evidence) -> Iterator[Account]:
    """The average takes in the weights as they were before the update."""
    before, ours, wanted = _steps(evidence)
    decay, weights = evidence.facts.get("ema"), evidence.before("weight")
    if not before or decay is None or not set(before) <= weights.keys():
        return
    added = {n: (1 - decay) * (weights[n] - before[n]) for n in before}
    repaired = {n: before[n] + ours[n] - added[n] + wanted[n] for n in before}
    yield Account("the average takes in weights before the update, one step too early", repaired)


def of_another_step(evidence: Evidence) -> Iterator[Account]:
    """The rate is that of a later step: the schedule is moved on by every rank."""
    rates = {step: row.get("learning_rate") for step, row in evidence.right.ranks[0].items()}
    ours = {step: row.get("learning_rate") for step, row in evidence.ours.ranks[0].items()}
    ways = [(f"once for each of {evidence.words_of(a)}", n, 0) for a, n in evidence.axes.items()]
    for words, times, more in [*ways, ("one step ahead", 1, 1), ("one step behind", 1, -1)]:
        moved = {step: times * step + more for step in ours if step >= 0}
        there = {step: at for step, at in moved.items() if at in rates and at >= 0}
        known = all(ours[step] == rates[at] for step, at in there.items())
        if evidence.step not in there or not known:
            continue
        at, wanted = there[evidence.step], float(evidence.wanted_row["learning_rate"])
        actual, right = float(ours[evidence.step] or 0.0), float(rates[at] or 0.0)
        says = f"the schedule is moved on {words}: step {evidence.step} has the rate of step {at}"
        ratio = right / wanted if wanted else None
        yield Account(says, {NUMBER: actual - right + wanted}, ratio)


# --- weighting -----------------------------------------------------------------------------------
# Means that are weighted wrongly: over ranks or micro-batches whose counts are not equal.


Weighing = Callable[[ShardPart], float]
COUNTS: dict[str, Weighing] = {
    "weight": lambda part: part.weight,
    "samples": lambda part: part.samples,
    "values": lambda part: part.values,
}
"""What a mean may be divided by: the weights of its values, its samples, or all its values."""


def instead(evidence: Evidence, by: Weighing) -> Mapping[str, Array | float]:
    """The job's numbers with the mean of one process in place of the parts weighed `by`."""
    parts = evidence.usable
    if parts is None:
        return {}
    if evidence.stage == "loss":
        weighed = sum(by(part) * part.loss for part in parts.each)
        right = sum(part.loss for part in parts.each) / parts.weight
        return {NUMBER: float(evidence.row()["loss"]) - weighed + right}
    ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
    return {
        name: ours[name]
        - (evidence.sum_of(parts.each, name, by) + evidence.regularizer_gradient(name))
        + wanted[name]
        for name in evidence.differing
        if name in ours and name in wanted
    }


def uneven(evidence: Evidence, by: Weighing) -> bool:
    """Whether this is another mean than that of one process."""
    parts = evidence.usable
    if parts is None:
        return False
    return any(abs(by(part) * parts.weight - 1) > 1e-9 for part in parts.each)


def of_ranks(evidence: Evidence) -> Iterator[Account]:
    """Every rank takes its own mean, and the mean of these is taken."""
    parts = evidence.usable
    if parts is None or len(parts.by_rank) < 2:
        return
    for count, of in COUNTS.items():
        sums = {rank: sum(map(of, pieces)) for rank, pieces in parts.by_rank.items()}
        if min(sums.values()) <= 0:
            continue
        ranks = len(sums)
        for divisor, words in (
            (ranks, "the mean of the ranks' means"),
            (1, "the sum of their means"),
        ):
            by = _weigher(sums, lambda part: part.rank, divisor)
            if uneven(evidence, by) and not _is_one_factor(parts, by):
                counts = ", ".join(f"{sums[rank]:g}" for rank in sorted(sums))
                says = f"{words} is taken, and ranks have unequal {count} ({counts})"
                yield Account(says, instead(evidence, by), None, tuple(sorted(sums)))


def of_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """Every micro-batch has its own mean, and the mean of these is taken."""
    parts = evidence.usable
    if parts is None or len(parts.by_micro) <= len(parts.by_rank):
        return
    for count, of in COUNTS.items():
        sums = {micro: sum(map(of, pieces)) for micro, pieces in parts.by_micro.items()}
        if min(sums.values()) <= 0:
            continue
        of_rank = {r: len({part.micro for part in pieces}) for r, pieces in parts.by_rank.items()}
        by_rank = {rank: len(of_rank) * many for rank, many in of_rank.items()}
        for ways in (by_rank, dict.fromkeys(of_rank, len(sums))):
            by = _of_micros(sums, ways)
            if uneven(evidence, by) and not _is_one_factor(parts, by):
                says = "the loss of each micro-batch is its own mean, divided by their number, and "
                yield Account(f"{says}they have unequal {count}", instead(evidence, by))


def padding_counted(evidence: Evidence) -> Iterator[Account]:
    """The sum is divided by all values, those of no weight included."""
    parts = evidence.usable
    if parts is None:
        return
    values = sum(part.values for part in parts.each)
    if abs(values / parts.weight - 1) < 1e-9:
        return
    says = f"the mean is over all {values} values; only {parts.weight:g} of them have a weight"
    yield Account(says, instead(evidence, lambda part: 1 / values), parts.weight / values)


def clipped_before(evidence: Evidence) -> Iterator[Account]:
    """Every rank clips what it has, and then gradients are summed."""
    parts, limit = evidence.usable, evidence.facts.get("clip_norm")
    if parts is None or not limit or evidence.stage != "gradient" or len(parts.by_rank) < 2:
        return
    for own_mean in (False, True):
        factors, divided = {}, {}
        for rank, pieces in parts.by_rank.items():
            weight = sum(part.weight for part in pieces) if own_mean else parts.weight
            divided[rank] = weight * (len(parts.by_rank) if own_mean else 1)
            factors[rank] = min(1.0, limit / (_length(evidence, pieces) / weight + 1e-6))
        by = _by_rank({rank: factors[rank] / divided[rank] for rank in factors})
        if uneven(evidence, by):
            shown = ", ".join(f"{factors[rank]:.4g}" for rank in sorted(factors))
            says = f"each rank clips its own gradient to {limit:g} before the sum (by {shown})"
            yield Account(says, instead(evidence, by), None, tuple(sorted(factors)))


def _length(evidence: Evidence, parts: Iterable[ShardPart]) -> float:
    """Of the gradient of the sum of these parts."""
    pieces = list(parts)
    sums = [evidence.sum_of(pieces, name, lambda _: 1.0) for name in evidence.wanted("gradient")]
    return math.sqrt(math.fsum(float(np.sum(np.square(total))) for total in sums))


def _is_one_factor(parts: BatchParts, by: Weighing) -> bool:
    """Whether all parts are weighed alike: a factor, which is another cause."""
    factors = {round(by(part) * parts.weight, 9) for part in parts.each}
    return len(factors) == 1


def _weigher(
    sums: Mapping[int, float], key: Callable[[ShardPart], int], divisor: float
) -> Weighing:
    return lambda part: 1 / (divisor * sums[key(part)])


def _of_micros(sums: Mapping[int, float], ways: Mapping[int, float]) -> Weighing:
    return lambda part: 1 / (ways[part.rank] * sums[part.micro])


def _by_rank(factors: Mapping[int, float]) -> Weighing:
    return lambda part: factors[part.rank]
