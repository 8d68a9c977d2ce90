"""Counts of a step, and its loss: counted by several ranks, by one, or without weight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from allranks.tools.check.causes.cause import NUMBER, NUMBERS, SAMPLE_WEIGHT, Account, Evidence
from allranks.tools.check.causes.updates import COUNTS

COUNTED = {"samples": "samples", SAMPLE_WEIGHT: "weight"}
"""The counts of a step, and what each sums up."""


def _counted(evidence: Evidence) -> float | None:
    """The job's count of samples or weights, if that is what differs."""
    if evidence.stage not in COUNTED or evidence.parts is None:
        return None
    total = evidence.row()[NUMBERS[evidence.stage]]
    return None if total == evidence.wanted_row[NUMBERS[evidence.stage]] else float(total)


def by_several(evidence: Evidence) -> Iterator[Account]:
    """Every rank along an axis counts the samples that they all have."""
    total = _counted(evidence)
    if total is None:
        return
    wanted = float(evidence.wanted_row[NUMBERS[evidence.stage]])
    for axis, size in evidence.axes.items():
        if wanted and abs(total / wanted - size) < 1e-9:
            says = f"all {size} ranks along {axis!r} count the same samples"
            yield Account(says, {NUMBER: total / size}, float(size), evidence.mesh.group(0, axis))


def by_one(evidence: Evidence) -> Iterator[Account]:
    """What one rank counts takes the place of the sum over all."""
    total, parts = _counted(evidence), evidence.parts
    if total is None or parts is None or len(parts.by_rank) < 2:
        return
    of = COUNTS[COUNTED[evidence.stage]]
    each = {rank: sum(map(of, pieces)) for rank, pieces in parts.by_rank.items()}
    for rank, count in each.items():
        remaining = sum(each.values()) - count
        says = f"only what rank {rank} counts is there: the sum over the ranks is lost"
        yield Account(says, {NUMBER: total + remaining}, None, (rank,))
        says = f"what rank {rank} counts is lost in the sum over the ranks"
        yield Account(says, {NUMBER: total + count}, None, (rank,))


def as_full(evidence: Evidence) -> Iterator[Account]:
    """A shorter micro-batch is counted as long as the first."""
    total, parts = _counted(evidence), evidence.parts
    if total is None or parts is None or len(parts.by_micro) < 2:
        return
    sizes = [sum(part.samples for part in pieces) for pieces in parts.by_micro.values()]
    if len(set(sizes)) > 1:
        more = len(sizes) * sizes[0] - sum(sizes)
        says = f"micro-batches of {min(sizes)} samples are counted as if they had {sizes[0]}"
        yield Account(says, {NUMBER: total - more})


def with_padding(evidence: Evidence) -> Iterator[Account]:
    """Values of no weight count as any other."""
    total, parts = _counted(evidence), evidence.parts
    if total is None or parts is None or evidence.stage != SAMPLE_WEIGHT:
        return
    values, weights = sum(part.values for part in parts.each), parts.weight
    if abs(values - weights) > 1e-9:
        says = f"all {values} values are counted, and only {weights:g} of them have a weight"
        yield Account(says, {NUMBER: total - values + weights}, values / weights)


def samples_together(evidence: Evidence) -> Iterator[Account]:
    """Parts do not add up: one process that cuts its batch as the ranks do has their result."""
    cut, stage = evidence.cut, evidence.stage
    if cut is None or evidence.usable is not None:
        return
    says = (
        "the result follows how the batch is cut, in one process too: a loss that is a mean over "
    )
    says += "a micro-batch, samples that see each other, or random numbers that belong to no sample"
    if stage in NUMBERS:
        number, other = (
            trace.ranks[0][evidence.step][NUMBERS[stage]] for trace in (evidence.ours, cut)
        )
        right = evidence.wanted_row[NUMBERS[stage]]
        if None not in (number, other, right):
            yield Account(says, {NUMBER: float(number) - float(other) + float(right)})
        return
    alone = {n.removeprefix(f"{stage}/"): t for n, t in cut.tensors(evidence.step).items()}
    ours, wanted = evidence.actual(stage), evidence.wanted(stage)
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
    faulty = parts.otherwise[name]
    if abs(faulty - right) <= 1e-12 * abs(right):
        return  # nothing would differ
    number = float(evidence.row()["loss"]) - faulty / parts.weight + right / parts.weight
    yield Account(says, {NUMBER: number})


def labels_cut(evidence: Evidence) -> Iterator[Account]:
    """The last position of each rank's part of a sequence has no label: it was shifted after."""
    parts = evidence.usable
    if parts is None:
        return
    for axis, size in evidence.axes.items():
        lost = labels = 0.0
        for part in parts.each:
            losses, weights = part.tensors["losses"], part.tensors["weights"]
            if losses.ndim < 2 or losses.shape[1] < 2 * size:
                return
            ends = [chunk[-1] for chunk in np.array_split(np.arange(losses.shape[1]), size)][:-1]
            lost += float(losses[:, ends].sum())
            labels += float(weights.sum() - weights[:, ends].sum())
        total = sum(part.loss for part in parts.each)
        says = (
            f"labels are shifted after the sequence was cut over {size} ranks along {axis!r}: the "
        )
        says += "last position of each part has no label"
        if evidence.stage == SAMPLE_WEIGHT:
            number = float(evidence.row()["weight"]) - labels + parts.weight
        else:
            number = float(evidence.row()["loss"]) - (total - lost) / labels + total / parts.weight
        yield Account(says, {NUMBER: number})


# --- factors -------------------------------------------------------------------------------------
# Gradients that are times a number of the job: of its ranks, its micro-batches, its loss scale.


def summed(evidence: Evidence) -> Iterator[Account]:
    """All gradients times the ranks along an axis, or one over them."""
    ratio = _ratio(evidence)
    if ratio is None or not _are_all(evidence):
        return
    for words, count in _counts_of_ranks(evidence):
        if _is(ratio, count):
            says = f"gradients are the sum over {words} where their mean is wanted, or summed twice"
            yield _undone(evidence, says, count)
        elif _is(ratio, 1 / count):
            yield _undone(evidence, f"gradients are divided once too often by {words}", 1 / count)


def by_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """All gradients times the micro-batches of a rank, or one over them."""
    ratio = _ratio(evidence)
    if ratio is None or not _are_all(evidence):
        return
    count = _micro_batches(evidence)
    if count > 1 and _is(ratio, count):
        says = f"gradients of the {count} micro-batches are summed, and the sum is not divided"
        yield _undone(evidence, says, count)
    elif count > 1 and _is(ratio, 1 / count):
        says = f"gradients are divided once too often by the {count} micro-batches"
        yield _undone(evidence, says, 1 / count)


def by_loss_scale(evidence: Evidence) -> Iterator[Account]:
    """All gradients still times the loss scale of fp16, or divided by it twice."""
    ratio, scale = _ratio(evidence), evidence.row().get("loss_scale")
    if ratio is None or not scale or scale == 1 or not _are_all(evidence):
        return
    if _is(ratio, scale):
        yield _undone(evidence, f"gradients are still times the loss scale of {scale:g}", scale)
    elif _is(ratio, 1 / scale):
        says = f"gradients are divided twice by the loss scale of {scale:g}"
        yield _undone(evidence, says, 1 / scale)
    elif _is(ratio, 2.0) or _is(ratio, 0.5):
        says = f"gradients are divided by another loss scale than the {scale:g} they were made with"
        yield _undone(evidence, says, round(ratio, 1))


def some_times_ranks(evidence: Evidence) -> Iterator[Account]:
    """Some gradients times the ranks along an axis, or one over them: the others are right."""
    ratio = _ratio(evidence)
    if ratio is None or _are_all(evidence):
        return
    them = _names_in_words(evidence)
    for words, count in _counts_of_ranks(evidence):
        if _is(ratio, count):
            says = f"the gradients of {them} are times {words}: they hold every rank's part already"
            yield _undone(evidence, says, count)
        elif _is(ratio, 1 / count):
            says = f"the gradients of {them} are divided by {words}, which all have the whole of it"
            yield _undone(evidence, says, 1 / count)


def some_times_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """Some gradients times the micro-batches, or one over them: the others are right."""
    ratio, count = _ratio(evidence), _micro_batches(evidence)
    if ratio is None or count == 1 or _are_all(evidence):
        return
    them = _names_in_words(evidence)
    if _is(ratio, count):
        says = f"the gradients of {them} are the undivided sum of {count} micro-batches"
        yield _undone(evidence, says, count)
    elif _is(ratio, 1 / count):
        says = f"the gradients of {them} are divided again by the {count} micro-batches"
        yield _undone(evidence, says, 1 / count)


def _names_in_words(evidence: Evidence) -> str:
    """Which tensors these are, in words."""
    names = evidence.differing
    if all(name in evidence.facts.get("cut", {}) for name in names):
        return "weights of which each rank holds a part"
    if all(name.rpartition(".")[2] == "bias" for name in names):
        return "biases"
    rooms = {name.partition(".")[0] for name in names}
    return f"layer {rooms.pop()!r}" if len(rooms) == 1 else f"{len(names)} weights"


def _micro_batches(evidence: Evidence) -> int:
    counts = [len(rank[evidence.step].get("micro_batches") or ()) for rank in evidence.ours.ranks]
    return max([1, *counts])


def _counts_of_ranks(evidence: Evidence) -> list[tuple[str, int]]:
    """How many ranks there are along each axis, and in all."""
    counts = [(evidence.words_of(axis), size) for axis, size in evidence.axes.items()]
    if len(evidence.axes) != 1 and evidence.ranks > 1:
        counts.append((f"all {evidence.ranks} ranks", evidence.ranks))
    return counts


def _are_all(evidence: Evidence) -> bool:
    wanted = evidence.wanted(evidence.stage)
    nonzero = {name for name, tensor in wanted.items() if np.any(tensor)}
    return nonzero <= set(evidence.differing)


def _ratio(evidence: Evidence) -> float | None:
    """The factor between every differing tensor and that of one process, if there is one."""
    ours, wanted = evidence.actual(evidence.stage), evidence.wanted(evidence.stage)
    dot = square = 0.0
    for name in evidence.differing:
        if name not in ours or name not in wanted or ours[name].shape != wanted[name].shape:
            return None
        a, b = ours[name].astype(np.float64).ravel(), wanted[name].astype(np.float64).ravel()
        dot, square = dot + float(a @ b), square + float(b @ b)
    ratio = dot / square if square else None
    return ratio if ratio is None or np.isfinite(ratio) else None


def _is(ratio: float, count: float) -> bool:
    near = 1e-3  # the repair decides
    return abs(ratio / count - 1) < near


def _undone(evidence: Evidence, says: str, factor: float) -> Account:
    ours = evidence.actual(evidence.stage)
    repaired = {name: ours[name] / factor for name in evidence.differing}
    return Account(says, repaired, factor, tuple(range(evidence.ranks)))
