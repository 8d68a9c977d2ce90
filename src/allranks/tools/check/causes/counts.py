"""Counts of a step, and its loss: what is counted by several ranks, by one, or without weight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from allranks.tools.check.causes.cause import NUMBER, Account
from allranks.tools.check.causes.evidence import NUMBERS, SAMPLE_WEIGHT, Evidence
from allranks.tools.check.causes.weighting import COUNTS

COUNTED = {"samples": "samples", SAMPLE_WEIGHT: "weight"}
"""The counts of a step, and what each sums up."""


def _counted(evidence: Evidence) -> float | None:
    """What the job counts, of samples or weights, if that is what differs."""
    if evidence.stage not in COUNTED or evidence.parts is None:
        return None
    found = evidence.row()[NUMBERS[evidence.stage]]
    return None if found == evidence.wanted_row[NUMBERS[evidence.stage]] else float(found)


def by_several(evidence: Evidence) -> Iterator[Account]:
    """Every rank along an axis counts the samples that they all have."""
    found = _counted(evidence)
    if found is None:
        return
    wanted = float(evidence.wanted_row[NUMBERS[evidence.stage]])
    for axis, size in evidence.axes.items():
        if wanted and abs(found / wanted - size) < 1e-9:
            says = f"all {size} ranks along {axis!r} count the same samples"
            yield Account(says, {NUMBER: found / size}, float(size), evidence.mesh.group(0, axis))


def by_one(evidence: Evidence) -> Iterator[Account]:
    """What one rank counts takes the place of the sum over all."""
    found, parts = _counted(evidence), evidence.parts
    if found is None or parts is None or len(parts.by_rank) < 2:
        return
    of = COUNTS[COUNTED[evidence.stage]]
    each = {rank: sum(map(of, own)) for rank, own in parts.by_rank.items()}
    for rank, own in each.items():
        rest = sum(each.values()) - own
        says = f"only what rank {rank} counts is there: the sum over the ranks is lost"
        yield Account(says, {NUMBER: found + rest}, None, (rank,))
        says = f"what rank {rank} counts is lost in the sum over the ranks"
        yield Account(says, {NUMBER: found + own}, None, (rank,))


def as_full(evidence: Evidence) -> Iterator[Account]:
    """A shorter micro-batch is counted as long as the first."""
    found, parts = _counted(evidence), evidence.parts
    if found is None or parts is None or len(parts.by_micro) < 2:
        return
    sizes = [sum(part.samples for part in own) for own in parts.by_micro.values()]
    if len(set(sizes)) > 1:
        more = len(sizes) * sizes[0] - sum(sizes)
        says = f"micro-batches of {min(sizes)} samples are counted as if they had {sizes[0]}"
        yield Account(says, {NUMBER: found - more})


def with_padding(evidence: Evidence) -> Iterator[Account]:
    """Values of no weight count as any other."""
    found, parts = _counted(evidence), evidence.parts
    if found is None or parts is None or evidence.stage != SAMPLE_WEIGHT:
        return
    values, weights = sum(part.values for part in parts.each), parts.weight
    if abs(values - weights) > 1e-9:
        says = f"all {values} values are counted, and only {weights:g} of them have a weight"
        yield Account(says, {NUMBER: found - values + weights}, values / weights)


def samples_together(evidence: Evidence) -> Iterator[Account]:
    """Parts do not add up; one process that cuts its batch as the ranks do has what they have."""
    cut, stage = evidence.cut, evidence.stage
    if cut is None or evidence.usable is not None:
        return
    says = (
        "the result follows how the batch is cut, in one process too: a loss that is a mean over "
    )
    says += "a micro-batch, samples that see each other, or random numbers that belong to no sample"
    if stage in NUMBERS:
        found, other = (
            trace.ranks[0][evidence.step][NUMBERS[stage]] for trace in (evidence.ours, cut)
        )
        right = evidence.wanted_row[NUMBERS[stage]]
        if None not in (found, other, right):
            yield Account(says, {NUMBER: float(found) - float(other) + float(right)})
        return
    alone = {n.removeprefix(f"{stage}/"): t for n, t in cut.tensors(evidence.step).items()}
    ours, wanted = evidence.found(stage), evidence.wanted(stage)
    names = [n for n in evidence.differing if n in alone and n in ours and n in wanted]
    yield Account(says, {n: ours[n] - alone[n] + wanted[n] for n in names})


def one_stream(evidence: Evidence) -> Iterator[Account]:
    """Every rank draws the numbers that the first one draws."""
    yield from _otherwise(
        evidence, "one stream", "every rank draws the random numbers that rank 0 draws for its own"
    )


def bias_of_each(evidence: Evidence) -> Iterator[Account]:
    """Every rank adds a bias that is added once in one process."""
    yield from _otherwise(
        evidence, "biases", "every rank adds the whole bias of a layer before outputs are summed"
    )


def a_micro_batch_before(evidence: Evidence) -> Iterator[Account]:
    """The last micro-batch has the activations of the one before."""
    words = "the last micro-batch goes through later layers with what came of the one before"
    yield from _otherwise(evidence, "stale micro-batch", words)
    yield from _otherwise(evidence, "stale, with its draws", words)


def _otherwise(evidence: Evidence, name: str, says: str) -> Iterator[Account]:
    parts = evidence.usable
    if parts is None or name not in parts.otherwise:
        return
    right = sum(part.loss for part in parts.each)
    made = parts.otherwise[name]
    if abs(made - right) <= 1e-12 * abs(right):
        return  # nothing would differ
    number = float(evidence.row()["loss"]) - made / parts.weight + right / parts.weight
    yield Account(says, {NUMBER: number})


def labels_cut(evidence: Evidence) -> Iterator[Account]:
    """The last position of each rank's part of a sequence has no label: it was shifted after."""
    parts = evidence.usable
    if parts is None:
        return
    for axis, size in evidence.axes.items():
        lost = left = 0.0
        for part in parts.each:
            losses, weights = part.tensors["losses"], part.tensors["weights"]
            if losses.ndim < 2 or losses.shape[1] < 2 * size:
                return
            ends = [chunk[-1] for chunk in np.array_split(np.arange(losses.shape[1]), size)][:-1]
            lost += float(losses[:, ends].sum())
            left += float(weights.sum() - weights[:, ends].sum())
        total = sum(part.loss for part in parts.each)
        says = (
            f"labels are shifted after the sequence was cut over {size} ranks along {axis!r}: the "
        )
        says += "last position of each part has no label"
        if evidence.stage == SAMPLE_WEIGHT:
            number = float(evidence.row()["weight"]) - left + parts.weight
        else:
            number = float(evidence.row()["loss"]) - (total - lost) / left + total / parts.weight
        yield Account(says, {NUMBER: number})
