"""Means that are weighted wrongly: over ranks or micro-batches whose counts are not equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from allranks.tools.check.causes.cause import NUMBER, Account
from allranks.tools.check.causes.evidence import Evidence, Part, Parts
from allranks.tools.check.sizes import Array

Weighing = Callable[[Part], float]
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
        made = sum(by(part) * part.loss for part in parts.each)
        right = sum(part.loss for part in parts.each) / parts.weight
        return {NUMBER: float(evidence.row()["loss"]) - made + right}
    ours, wanted = evidence.found("gradient"), evidence.wanted("gradient")
    return {
        name: ours[name]
        - (evidence.sum_of(parts.each, name, by) + evidence.rest(name))
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
        sums = {rank: sum(map(of, own)) for rank, own in parts.by_rank.items()}
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
        sums = {micro: sum(map(of, own)) for micro, own in parts.by_micro.items()}
        if min(sums.values()) <= 0:
            continue
        of_rank = {r: len({part.micro for part in own}) for r, own in parts.by_rank.items()}
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
        for rank, own in parts.by_rank.items():
            weight = sum(part.weight for part in own) if own_mean else parts.weight
            divided[rank] = weight * (len(parts.by_rank) if own_mean else 1)
            factors[rank] = min(1.0, limit / (_length(evidence, own) / weight + 1e-6))
        by = _by_rank({rank: factors[rank] / divided[rank] for rank in factors})
        if uneven(evidence, by):
            shown = ", ".join(f"{factors[rank]:.4g}" for rank in sorted(factors))
            says = f"each rank clips its own gradient to {limit:g} before the sum (by {shown})"
            yield Account(says, instead(evidence, by), None, tuple(sorted(factors)))


def _length(evidence: Evidence, parts: Iterable[Part]) -> float:
    """Of the gradient of the sum of these parts."""
    own = list(parts)
    sums = [evidence.sum_of(own, name, lambda _: 1.0) for name in evidence.wanted("gradient")]
    return math.sqrt(math.fsum(float(np.sum(np.square(one))) for one in sums))


def _is_one_factor(parts: Parts, by: Weighing) -> bool:
    """Whether all parts are weighed alike: a factor, which is another cause."""
    found = {round(by(part) * parts.weight, 9) for part in parts.each}
    return len(found) == 1


def _weigher(sums: Mapping[int, float], key: Callable[[Part], int], divisor: float) -> Weighing:
    return lambda part: 1 / (divisor * sums[key(part)])


def _of_micros(sums: Mapping[int, float], ways: Mapping[int, float]) -> Weighing:
    return lambda part: 1 / (ways[part.rank] * sums[part.micro])


def _by_rank(factors: Mapping[int, float]) -> Weighing:
    return lambda part: factors[part.rank]
