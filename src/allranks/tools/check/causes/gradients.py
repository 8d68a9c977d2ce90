"""Gradients that are wrong: weighed unevenly, times a number of the job, or in part missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from allranks.strategies.shards import rows_of
from allranks.tools.check.causes.cause import (
    NUMBER,
    Account,
    BatchParts,
    Evidence,
    ShardPart,
)
from allranks.tools.check.sizes import Array

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


# --- missing -------------------------------------------------------------------------------------
# Parts that never arrive, or arrive twice: those of ranks, of micro-batches, of the last step.


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


def of_a_rank(evidence: Evidence) -> Iterator[Account]:
    """One rank's contribution is lost, or it is the only one."""
    parts = evidence.usable
    if parts is None or len(parts.by_rank) < 2 or _unequal_across_ranks(evidence):
        return
    for rank, pieces in parts.by_rank.items():
        weight = sum(part.weight for part in pieces)
        others = parts.weight - weight
        says = f"what rank {rank} brings in is lost"
        yield _weighed(evidence, says, _only(1 / parts.weight, rank, False), rank)
        if others > 0:
            detail = f"{says}, and the mean is over the others"
            yield _weighed(evidence, detail, _only(1 / others, rank, False), rank)
        if len(parts.by_rank) == 2:  # covered by the other rank
            continue
        says = f"only what rank {rank} brings in is there"
        yield _weighed(evidence, says, _only(1 / parts.weight, rank, True), rank)
        if weight > 0:
            detail = f"{says}, as its own mean"
            yield _weighed(evidence, detail, _only(1 / weight, rank, True), rank)


def of_other_ranks(evidence: Evidence) -> Iterator[Account]:
    """Each rank's part of a sharded gradient has only its own contribution."""
    parts, cut = evidence.usable, evidence.facts.get("cut", {})
    if parts is None or len(parts.by_rank) != evidence.ranks or not evidence.differing:
        return
    ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
    for times in (1.0, float(evidence.ranks)):
        repaired = {}
        for name in evidence.differing:
            if cut.get(name) != 0 or name not in ours or name not in wanted:
                return
            assembled = np.zeros_like(wanted[name])
            for rank, pieces in parts.by_rank.items():
                rows = list(rows_of(len(assembled), evidence.ranks, rank))
                contribution = np.asarray(evidence.sum_of(pieces, name, _all(times / parts.weight)))
                assembled[rows] = np.broadcast_to(contribution, assembled.shape)[rows]
            repaired[name] = ours[name] - assembled + wanted[name]
        says = "each rank's part of a gradient has only what that rank brings in"
        yield Account(says, repaired, None, tuple(range(evidence.ranks)))


def of_a_micro_batch(evidence: Evidence) -> Iterator[Account]:
    """A micro-batch is lost or counted twice, on one rank or, the last one, on all."""
    parts = evidence.usable
    if parts is None or len(parts.by_micro) <= len(parts.by_rank):
        return
    unit = 1 / parts.weight
    lasts = {max(part.micro for part in pieces) for pieces in parts.by_rank.values()}
    chosen = [(f"micro-batch {micro}", {micro}) for micro in parts.by_micro]
    chosen.append(("the last micro-batch of every rank", lasts))
    for words, micros in chosen:
        for times, verb in ((0.0, "is lost"), (2.0, "is counted twice")):
            by = _those(micros, unit * times, unit)
            yield Account(f"{words} {verb}", instead(evidence, by))
    for words, remaining in (("the last", lasts), ("the first", _firsts(evidence))):
        says = f"only {words} micro-batch of every rank is there"
        yield Account(says, instead(evidence, _those(remaining, unit, 0.0)))


def of_a_stale_step(evidence: Evidence) -> Iterator[Account]:
    """Gradients were not set to zero: those of the step before are in them."""
    if evidence.step < 1:
        return
    before = evidence.ours.tensors(evidence.step - 1)
    ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
    dot = square = 0.0
    for name in evidence.differing:
        old = before.get(f"gradient/{name}")
        if old is None or name not in ours or name not in wanted:
            return
        dot += float(((ours[name] - wanted[name]) * old).sum())
        square += float((old * old).sum())
    times = round(dot / square, 3) if square else 0.0
    if times not in {1.0, *map(float, evidence.axes.values()), float(evidence.ranks)}:
        return
    repaired = {n: ours[n] - times * before[f"gradient/{n}"] for n in evidence.differing}
    says = f"the gradient of the step before is still there, times {times:g}: it was not set to 0"
    yield Account(says, repaired, times)


def rounded(evidence: Evidence) -> Iterator[Account]:
    """Each rank's contribution was rounded to 16 bits before the sum."""
    parts = evidence.usable
    if parts is None:
        return
    ours, wanted = evidence.actual("gradient"), evidence.wanted("gradient")
    for words, cut in (("bf16", _bfloat16), ("fp16", _float16)):
        repaired = {}
        for name in evidence.differing:
            if name not in ours or name not in wanted:
                return
            each = [
                np.asarray(evidence.sum_of(pieces, name, lambda _: 1 / parts.weight))
                for pieces in parts.by_rank.values()
            ]
            off = sum(cut(part) - part for part in each)
            repaired[name] = ours[name] - off
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


def _weighed(evidence: Evidence, says: str, by: Weighing, rank: int) -> Account:
    return Account(says, instead(evidence, by), None, (rank,))


def _only(unit: float, rank: int, its: bool) -> Weighing:
    def by(part: ShardPart) -> float:
        return unit if (part.rank == rank) == its else 0.0

    return by


def _all(unit: float) -> Weighing:
    return lambda _: unit


def _those(micros: set[int], inside: float, outside: float) -> Weighing:
    return lambda part: inside if part.micro in micros else outside


def _firsts(evidence: Evidence) -> set[int]:
    parts = evidence.usable
    assert parts is not None
    return {min(part.micro for part in pieces) for pieces in parts.by_rank.values()}
