"""Numbers of a step that are wrong: its counts, its loss, the norm of its gradient, its rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from allranks.tools.check.causes.cause import (
    NUMBER,
    NUMBERS,
    SAMPLE_WEIGHT,
    Account,
    CauseTable,
    Evidence,
)
from allranks.tools.check.causes.gradients import counted

CAUSES = CauseTable()
COUNTED = {"samples": "samples", SAMPLE_WEIGHT: "weight"}
"""The counts of a step, and what each sums up."""


def _counted(evidence: Evidence) -> float | None:
    """The job's count of samples or weights, if that is what differs."""
    if evidence.stage not in COUNTED or evidence.parts is None:
        return None
    total = evidence.row()[NUMBERS[evidence.stage]]
    return None if total == evidence.wanted_row[NUMBERS[evidence.stage]] else float(total)


@CAUSES.row(
    "counted by each", *COUNTED, do="let one of the ranks that read the same samples count them"
)
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


@CAUSES.row(
    "micro-batch counted as full",
    *COUNTED,
    do="count the samples of each micro-batch, not of the first",
)
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


@CAUSES.row(
    "padding counted", SAMPLE_WEIGHT, do="sum the weights of the values, not how many there are"
)
def with_padding(evidence: Evidence) -> Iterator[Account]:
    """Values of no weight count as any other."""
    total, parts = _counted(evidence), evidence.parts
    if total is None or parts is None or evidence.stage != SAMPLE_WEIGHT:
        return
    values, weights = sum(part.values for part in parts.each), parts.weight
    if abs(values - weights) > 1e-9:
        says = f"all {values} values are counted, and only {weights:g} of them have a weight"
        yield Account(says, {NUMBER: total - values + weights}, values / weights)


@CAUSES.row(
    "labels shifted after the cut",
    SAMPLE_WEIGHT,
    "loss",
    do="shift labels on the whole sequence, and cut them with it",
)
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
        says = f"labels are shifted after the sequence was cut over {size} ranks along {axis!r}: "
        says += "the last position of each part has no label"
        if evidence.stage == SAMPLE_WEIGHT:
            number = float(evidence.row()["weight"]) - labels + parts.weight
        else:
            number = float(evidence.row()["loss"]) - (total - lost) / labels + total / parts.weight
        yield Account(says, {NUMBER: number})


@CAUSES.row(
    "sum over ranks lost",
    *COUNTED,
    do="add what comes from another rank to what is there, and sum over all of them",
)
def by_one(evidence: Evidence) -> Iterator[Account]:
    """What one rank counts takes the place of the sum over all."""
    total, parts = _counted(evidence), evidence.parts
    if total is None or parts is None or len(parts.by_rank) < 2:
        return
    each = counted(parts.by_rank, COUNTED[evidence.stage])
    for rank, count in each.items():
        remaining = sum(each.values()) - count
        says = f"only what rank {rank} counts is there: the sum over the ranks is lost"
        yield Account(says, {NUMBER: total + remaining}, None, (rank,))
        says = f"what rank {rank} counts is lost in the sum over the ranks"
        yield Account(says, {NUMBER: total + count}, None, (rank,))


@CAUSES.row(
    "result follows the cut",
    SAMPLE_WEIGHT,
    "loss",
    "gradient",
    "buffer",
    do=(
        "let loss and output of each sample follow it alone: no mean, statistics or padding "
        'over a micro-batch (weight(batch), loss_over = "batch"); draw with functions of torch'
    ),
)
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


def _otherwise(evidence: Evidence, says: str, faults: Sequence[str]) -> Iterator[Account]:
    """The loss is that of the batch with a fault, which one process has computed."""
    parts = evidence.usable
    if parts is None:
        return
    right = sum(part.loss for part in parts.each)
    for fault in faults:
        faulty = parts.otherwise.get(fault, right)
        if abs(faulty - right) > 1e-12 * abs(right):
            number = float(evidence.row()["loss"]) - faulty / parts.weight + right / parts.weight
            yield Account(says, {NUMBER: number})


for name, do, says, *faults in (
    (
        "one random stream",
        "seed what is drawn by the samples or the rank, not alike on every rank",
        "every rank draws the random numbers that rank 0 draws for its own",
        "one stream",
    ),
    (
        "bias of each rank",
        "add the bias after the sum over the ranks, or on one of them",
        "every rank adds the whole bias of a layer before outputs are summed",
        "biases",
    ),
    (
        "micro-batch mixed up",
        "keep what each micro-batch sends apart, by its number",
        "the last micro-batch goes through later layers with what came of the one before",
        "stale micro-batch",
        "stale, with its draws",
    ),
):
    CAUSES.row(name, "loss", do=do)(partial(_otherwise, says=says, faults=faults))


# --- norm ----------------------------------------------------------------------------------------
# The norm of a sharded gradient: squares that are left out of it, or counted twice.


def _squares(evidence: Evidence) -> list[tuple[float, float]]:
    """Of each rank: the squares of what it holds parts of, and of what it holds whole."""
    rows = [rank[evidence.step] for rank in evidence.ours.ranks]
    squares = [row.get("own_squares", {}).get("gradient", {}) for row in rows]
    return [(square["cut"], square["whole"]) for square in squares if square]


@CAUSES.row(
    "norm of some ranks",
    "gradient norm",
    do="sum the squares of all parts over all axes before the root is taken",
)
def of_some_ranks(evidence: Evidence) -> Iterator[Account]:
    """The squares of one rank, or of the ranks along one axis, are never added to the others."""
    each = _squares(evidence)
    if len(each) != evidence.ranks or evidence.ranks < 2:
        return
    groups: list[tuple[str, tuple[int, ...]]]
    groups = [(f"rank {rank} holds", (rank,)) for rank in range(evidence.ranks)]
    if len(evidence.axes) > 1:
        for axis in evidence.axes:
            words = f"the ranks along {axis!r} hold"
            groups.append((words, evidence.mesh.group(0, axis)))
    for words, ranks in groups:
        cut = math.fsum(each[rank][0] for rank in ranks)
        wholes = [each[rank][1] for rank in ranks]
        for whole in {max(wholes), math.fsum(wholes)}:
            says = f"the length of the gradient is that of what {words}; the rest is left out"
            yield _of_length(evidence, says, cut + whole, ranks)


@CAUSES.row(
    "norm counts copies", "gradient norm", do="add the squares of what several ranks hold once"
)
def whole_by_each(evidence: Evidence) -> Iterator[Account]:
    """What several ranks hold whole is counted by each of them."""
    each = _squares(evidence)
    if len(each) != evidence.ranks or evidence.ranks < 2:
        return
    total = float(evidence.wanted_row["grad_norm"]) ** 2
    whole = max(squares for _, squares in each)
    for axis, size in [*evidence.axes.items(), ("all", evidence.ranks)]:
        ranks, group = f"all {size} ranks along {axis!r}", evidence.mesh.group(0, axis)
        says = f"weights that {ranks} hold whole are counted by each of them"
        yield _of_length(evidence, says, total + (size - 1) * whole, group)
        says = f"what {ranks} hold is counted by each of them"
        yield _of_length(evidence, says, size * total, group)


def _of_length(evidence: Evidence, says: str, squares: float, ranks: tuple[int, ...]) -> Account:
    length, right = float(evidence.row()["grad_norm"]), float(evidence.wanted_row["grad_norm"])
    ratio = length / right if right else None
    return Account(says, {NUMBER: length - math.sqrt(squares) + right}, ratio, ranks)


# --- rates ---------------------------------------------------------------------------------------
# A schedule that is moved on by every rank.


@CAUSES.row(
    "schedule",
    "learning rate",
    do="move the schedule on once for each step of the optimizer, whatever the ranks",
)
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
