"""Gradients that are wrong: weighed unevenly, times a number of the job, or in part missing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np

from allranks.strategies.shards import rows_of
from allranks.tools.check.causes.cause import (
    NUMBER,
    Account,
    BatchParts,
    CauseTable,
    Evidence,
    ShardPart,
)
from allranks.tools.check.sizes import Array

CAUSES = CauseTable()
BOTH = ("loss", "gradient")
NEAR = 1e-3
COUNTS = ("weight", "samples", "values")
"""What a mean may be divided by: the weights of its values, its samples, or all its values."""

# --- weighting -----------------------------------------------------------------------------------
# Means that are weighted wrongly: over ranks or micro-batches whose counts are not equal. Weights
# are one number for each part of the batch, in the order of the parts.


def counted(groups: Mapping[int, Sequence[ShardPart]], count: str) -> dict[int, float]:
    """The sum of a count of `COUNTS` over each group of parts."""
    return {n: sum(getattr(part, count) for part in pieces) for n, pieces in groups.items()}


def _weighed(
    evidence: Evidence, says: str, weights: Sequence[float], ranks: tuple[int, ...] = ()
) -> Account:
    """The account by which the job has the parts with these weights, not the mean of all."""
    parts = evidence.usable
    assert parts is not None
    repaired: Mapping[str, Array | float]
    if evidence.stage == "loss":
        faulty = sum(w * part.loss for w, part in zip(weights, parts.each, strict=True))
        right = sum(part.loss for part in parts.each) / parts.weight
        repaired = {NUMBER: float(evidence.row()["loss"]) - faulty + right}
    else:
        ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
        repaired = {
            name: ours[name]
            - (evidence.sum_of(parts.each, name, weights) + evidence.regularizer_gradient(name))
            + wanted[name]
            for name in evidence.differing
        }
    return Account(says, repaired, ranks=ranks)


def _factors(parts: BatchParts, weights: Sequence[float]) -> set[float]:
    """The weights beside that of a part in the mean of all: {1.0} for that mean."""
    return {round(weight * parts.weight, 9) for weight in weights}


@CAUSES.row(
    "mean of means",
    *BOTH,
    do="sum losses and counts over all ranks, and divide once by the sum of the counts",
)
def of_ranks(evidence: Evidence) -> Iterator[Account]:
    """Every rank takes its own mean, and the mean of these is taken."""
    parts = evidence.usable
    if parts is None or len(parts.by_rank) < 2:
        return
    for count in COUNTS:
        sums = counted(parts.by_rank, count)
        if min(sums.values()) <= 0:
            continue
        ways = ((len(sums), "the mean of the ranks' means"), (1, "the sum of their means"))
        for divisor, words in ways:
            weights = [1 / (divisor * sums[part.rank]) for part in parts.each]
            if len(_factors(parts, weights)) > 1:
                counts = ", ".join(f"{sums[rank]:g}" for rank in sorted(sums))
                says = f"{words} is taken, and ranks have unequal {count} ({counts})"
                yield _weighed(evidence, says, weights, tuple(sorted(sums)))


@CAUSES.row(
    "mean of micro-batch means",
    *BOTH,
    do="sum the losses of all micro-batches, and divide once by the count of all",
)
def of_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """Every micro-batch has its own mean, and the mean of these is taken."""
    parts = evidence.usable
    if parts is None or len(parts.by_micro) <= len(parts.by_rank):
        return
    for count in COUNTS:
        sums = counted(parts.by_micro, count)
        if min(sums.values()) <= 0:
            continue
        of_rank = {r: len({part.micro for part in pieces}) for r, pieces in parts.by_rank.items()}
        by_rank = {rank: len(of_rank) * many for rank, many in of_rank.items()}
        for ways in (by_rank, dict.fromkeys(of_rank, len(sums))):
            weights = [1 / (ways[part.rank] * sums[part.micro]) for part in parts.each]
            if len(_factors(parts, weights)) > 1:
                says = "the loss of each micro-batch is its own mean, divided by their number, and "
                yield _weighed(evidence, f"{says}they have unequal {count}", weights)


@CAUSES.row(
    "padding counted",
    *BOTH,
    do="divide by the sum of the weights, not by how many values there are",
)
def padding_counted(evidence: Evidence) -> Iterator[Account]:
    """The sum is divided by all values, those of no weight included."""
    parts = evidence.usable
    if parts is None:
        return
    values = sum(part.values for part in parts.each)
    if abs(values / parts.weight - 1) < 1e-9:
        return
    says = f"the mean is over all {values} values; only {parts.weight:g} of them have a weight"
    account = _weighed(evidence, says, [1 / values] * len(parts.each))
    yield dataclasses.replace(account, ratio=parts.weight / values)


@CAUSES.row(
    "clipped before the sum",
    "gradient",
    do="clip after gradients are summed, by the norm of the sum",
)
def clipped_before(evidence: Evidence) -> Iterator[Account]:
    """Every rank clips what it has, and then gradients are summed."""
    parts, limit = evidence.usable, evidence.facts.get("clip_norm")
    if parts is None or not limit or len(parts.by_rank) < 2:
        return
    for local_mean in (False, True):
        clips, weight_on = {}, {}
        for rank, pieces in parts.by_rank.items():
            weight = sum(part.weight for part in pieces) if local_mean else parts.weight
            clips[rank] = min(1.0, limit / (_length(evidence, pieces) / weight + 1e-6))
            weight_on[rank] = clips[rank] / (weight * (len(parts.by_rank) if local_mean else 1))
        weights = [weight_on[part.rank] for part in parts.each]
        if _factors(parts, weights) != {1.0}:
            shown = ", ".join(f"{clips[rank]:.4g}" for rank in sorted(clips))
            says = f"each rank clips its own gradient to {limit:g} before the sum (by {shown})"
            yield _weighed(evidence, says, weights, tuple(sorted(clips)))


def _length(evidence: Evidence, parts: Sequence[ShardPart]) -> float:
    """The norm of the gradient of the sum of these parts."""
    names = evidence.wanted("gradient")
    sums = [evidence.sum_of(parts, name, repeat(1.0)) for name in names]
    return math.sqrt(math.fsum(float(np.sum(np.square(total))) for total in sums))


# --- factors -------------------------------------------------------------------------------------
# Gradients that are times a number of the job: of its ranks, its micro-batches, its loss scale.


@CAUSES.row(
    "summed, not averaged",
    "gradient",
    do="divide once, by the weight of the whole batch; sum over each axis once",
)
def summed(evidence: Evidence) -> Iterator[Account]:
    """All gradients times the ranks along an axis, or one over them."""
    for words, count in _counts_of_ranks(evidence) if _are_all(evidence) else ():
        times = f"gradients are the sum over {words} where their mean is wanted, or summed twice"
        over = f"gradients are divided once too often by {words}"
        yield from _divided(evidence, (count, times), (1 / count, over))


@CAUSES.row(
    "micro-batches not averaged",
    "gradient",
    do="divide the loss of every micro-batch by what all of them weigh together",
)
def by_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """All gradients times the micro-batches of a rank, or one over them."""
    count = _micro_batches(evidence)
    if count > 1 and _are_all(evidence):
        times = f"gradients of the {count} micro-batches are summed, and the sum is not divided"
        over = f"gradients are divided once too often by the {count} micro-batches"
        yield from _divided(evidence, (count, times), (1 / count, over))


@CAUSES.row(
    "loss scale",
    "gradient",
    do="divide gradients once by the loss scale that their loss was multiplied by",
)
def by_loss_scale(evidence: Evidence) -> Iterator[Account]:
    """All gradients still times the loss scale of fp16, or divided by it twice."""
    scale = evidence.row().get("loss_scale")
    if scale and scale != 1 and _are_all(evidence):
        other = f"another loss scale than the {scale:g} they were made with"
        yield from _divided(
            evidence,
            (scale, f"gradients are still times the loss scale of {scale:g}"),
            (1 / scale, f"gradients are divided twice by the loss scale of {scale:g}"),
            (2.0, f"gradients are divided by {other}"),
            (0.5, f"gradients are divided by {other}"),
        )


@CAUSES.row(
    "some gradients times ranks",
    "gradient",
    do="divide by the ranks that bring something in, which of these weights are other ones",
)
def some_times_ranks(evidence: Evidence) -> Iterator[Account]:
    """Some gradients times the ranks along an axis, or one over them: the others are right."""
    them = _names_in_words(evidence)
    for words, count in () if _are_all(evidence) else _counts_of_ranks(evidence):
        times = f"the gradients of {them} are times {words}: they hold every rank's part already"
        over = f"the gradients of {them} are divided by {words}, which all have the whole of it"
        yield from _divided(evidence, (count, times), (1 / count, over))


@CAUSES.row(
    "some gradients times micro-batches",
    "gradient",
    do="scale the loss alone: what comes back from a later stage is scaled already",
)
def some_times_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """Some gradients times the micro-batches, or one over them: the others are right."""
    count, them = _micro_batches(evidence), _names_in_words(evidence)
    if count > 1 and not _are_all(evidence):
        times = f"the gradients of {them} are the undivided sum of {count} micro-batches"
        over = f"the gradients of {them} are divided again by the {count} micro-batches"
        yield from _divided(evidence, (count, times), (1 / count, over))


def _divided(evidence: Evidence, *ways: tuple[float, str]) -> Iterator[Account]:
    """An account of the first factor that all differing gradients have; the repair decides."""
    ratio, ours = evidence.ratio, evidence.actual(evidence.stage)
    for factor, says in ways:
        if ratio is not None and abs(ratio / factor - 1) < NEAR:
            repaired = {name: ours[name] / factor for name in evidence.differing}
            yield Account(says, repaired, factor, tuple(range(evidence.ranks)))
            return


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


@CAUSES.row(
    "untied", "gradient", do="sum the gradients of a shared weight over all ranks that use it"
)
def untied(evidence: Evidence) -> Iterator[Account]:
    """A weight that several layers use has the gradient of one of them."""
    parts = evidence.usable
    if parts is None:
        return
    shared = [name for name in evidence.differing if name in parts.by_use]
    ours = evidence.actual(evidence.stage)
    if not shared or set(shared) != set(evidence.differing) or not set(shared) <= ours.keys():
        return
    uses = max(len(parts.by_use[name]) for name in shared)
    for lost in range(uses):
        repaired = {}
        for name in shared:
            if lost < len(parts.by_use[name]):
                repaired[name] = ours[name] + parts.by_use[name][lost] / parts.weight
        says = (
            f"a weight that {uses} layers share is untied: the gradient of use {lost + 1} is lost"
        )
        yield Account(says, repaired, None, (), tuple(shared))


# --- missing -------------------------------------------------------------------------------------
# Parts that never arrive, or arrive twice: those of ranks, of micro-batches, of the last step.


@CAUSES.row(
    "sum over ranks lost", "gradient", do="sum these gradients over that axis before they are used"
)
def not_summed(evidence: Evidence) -> Iterator[Account]:
    """Every rank has its own part: their sum along an axis is what one process has."""
    split = _unequal_across_ranks(evidence)
    if not split:
        return
    each = [evidence.actual(evidence.stage, rank) for rank in range(evidence.ranks)]
    ways = [(f"over {evidence.words_of(a)}", evidence.mesh.group(0, a)) for a in evidence.axes]
    if len(evidence.axes) > 1:
        ways.append(("over all ranks", tuple(range(evidence.ranks))))
    for words, group in ways:
        if not all(name in each[rank] for name in split for rank in group):
            continue
        sums = {name: sum(each[rank][name] for rank in group) for name in split}
        derived = len(set(evidence.differing) - set(split))
        more = f"; the other {derived} that differ are made from these" if derived else ""
        for divisor, kind in ((1, "sum"), (len(group), "mean")):
            repaired = {name: total / divisor for name, total in sums.items()}
            says = f"gradients are each rank's own: their {kind} {words} was never taken{more}"
            yield Account(says, repaired, None, group, split)


@CAUSES.row(
    "part of a rank lost",
    *BOTH,
    do="let every rank's part be in the sum: the same buckets, in the same order, on all",
)
def of_a_rank(evidence: Evidence) -> Iterator[Account]:
    """One rank's contribution is lost, or it is the only one."""
    parts = evidence.usable
    if parts is None or len(parts.by_rank) < 2 or _unequal_across_ranks(evidence):
        return
    for rank, weight in counted(parts.by_rank, "weight").items():
        lost = f"what rank {rank} brings in is lost"
        only = f"only what rank {rank} brings in is there"
        ways = [
            (False, lost, parts.weight),
            (False, f"{lost}, and the mean is over the others", parts.weight - weight),
        ]
        if len(parts.by_rank) > 2:  # of two, the other one covers it
            ways += [(True, only, parts.weight), (True, f"{only}, as its own mean", weight)]
        for alone, says, divisor in ways:
            if divisor > 0:
                there = [(part.rank == rank) == alone for part in parts.each]
                weights = [1 / divisor if is_there else 0.0 for is_there in there]
                yield _weighed(evidence, says, weights, (rank,))


@CAUSES.row(
    "part of a rank lost",
    "gradient",
    do="add what every rank brings in to each part, before the ranks keep theirs",
)
def of_other_ranks(evidence: Evidence) -> Iterator[Account]:
    """Each rank's part of a sharded gradient has only its own contribution."""
    parts, cut = evidence.usable, evidence.facts.get("cut", {})
    if parts is None or len(parts.by_rank) != evidence.ranks:
        return
    if any(cut.get(name) != 0 for name in evidence.differing):
        return
    ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
    for times in (1.0, float(evidence.ranks)):
        repaired = {}
        for name in evidence.differing:
            assembled = np.zeros_like(wanted[name])
            for rank, pieces in parts.by_rank.items():
                rows = list(rows_of(len(assembled), evidence.ranks, rank))
                local = evidence.sum_of(pieces, name, repeat(times / parts.weight))
                assembled[rows] = np.broadcast_to(np.asarray(local), assembled.shape)[rows]
            repaired[name] = ours[name] - assembled + wanted[name]
        says = "each rank's part of a gradient has only what that rank brings in"
        yield Account(says, repaired, ranks=tuple(range(evidence.ranks)))


@CAUSES.row(
    "micro-batch lost",
    *BOTH,
    do="sum after the last backward pass, over all of them; no_sync on all but the last",
)
def of_a_micro_batch(evidence: Evidence) -> Iterator[Account]:
    """A micro-batch is lost or counted twice, on one rank or, the last one, on all."""
    parts = evidence.usable
    if parts is None or len(parts.by_micro) <= len(parts.by_rank):
        return
    unit = 1 / parts.weight
    firsts = {min(part.micro for part in pieces) for pieces in parts.by_rank.values()}
    lasts = {max(part.micro for part in pieces) for pieces in parts.by_rank.values()}
    chosen = [(f"micro-batch {micro}", {micro}) for micro in parts.by_micro]
    chosen.append(("the last micro-batch of every rank", lasts))
    for words, micros in chosen:
        for times, verb in ((0.0, "is lost"), (2.0, "is counted twice")):
            weights = [unit * times if part.micro in micros else unit for part in parts.each]
            yield _weighed(evidence, f"{words} {verb}", weights)
    for words, micros in (("the last", lasts), ("the first", firsts)):
        weights = [unit if part.micro in micros else 0.0 for part in parts.each]
        yield _weighed(evidence, f"only {words} micro-batch of every rank is there", weights)


@CAUSES.row(
    "gradient of the last step",
    "gradient",
    do="set every gradient and bucket to zero when a step begins",
)
def of_a_stale_step(evidence: Evidence) -> Iterator[Account]:
    """Gradients were not set to zero: those of the step before are in them."""
    if evidence.step < 1:
        return
    before = evidence.ours.tensors(evidence.step - 1)
    ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
    dot = square = 0.0
    for name in evidence.differing:
        old = before.get(f"gradient/{name}")
        if old is None:
            return
        dot += float(((ours[name] - wanted[name]) * old).sum())
        square += float((old * old).sum())
    times = round(dot / square, 3) if square else 0.0
    if times not in {1.0, *map(float, evidence.axes.values()), float(evidence.ranks)}:
        return
    repaired = {n: ours[n] - times * before[f"gradient/{n}"] for n in evidence.differing}
    says = f"the gradient of the step before is still there, times {times:g}: it was not set to 0"
    yield Account(says, repaired, times)


@CAUSES.row(
    "rounded before the sum",
    "gradient",
    do="sum gradients in 32 bits, or ask for reduce=bf16, whose card says so",
)
def rounded(evidence: Evidence) -> Iterator[Account]:
    """Each rank's contribution was rounded to 16 bits before the sum."""
    parts = evidence.usable
    if parts is None:
        return
    ours, unit = evidence.actual("gradient"), repeat(1 / parts.weight)
    for words, cut in (("bf16", _bfloat16), ("fp16", _float16)):
        repaired = {}
        for name in evidence.differing:
            sums = (evidence.sum_of(pieces, name, unit) for pieces in parts.by_rank.values())
            repaired[name] = ours[name] - sum(cut(local) - local for local in map(np.asarray, sums))
        largest = max((evidence.size(n, ours[n]) for n in evidence.differing), default=0.0)
        # a value half-way between two of 16 bits may be rounded to either
        limit = max(largest / 50, max(map(evidence.limit, evidence.differing), default=0.0))
        says = f"gradients are rounded to {words} before they are summed over the ranks"
        yield Account(says, repaired, limit=limit)


def _bfloat16(array: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(array.astype(np.float32)).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32).astype(np.float64)


def _float16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float64)


def _unequal_across_ranks(evidence: Evidence) -> tuple[str, ...]:
    """The differing tensors that are unequal among the ranks."""
    each = [evidence.actual(evidence.stage, rank) for rank in range(len(evidence.tensors_of_ranks))]
    if len(each) < 2:
        return ()
    names = []
    for name in evidence.differing:
        copies = [tensors.get(name) for tensors in each]
        if any(o is None or o.shape != copies[0].shape for o in copies):  # type: ignore[union-attr]
            continue
        if any(not np.array_equal(o, copies[0]) for o in copies[1:]):  # type: ignore[arg-type]
            names.append(name)
    return tuple(names)
