"""Parts that never arrive, or arrive twice: those of ranks, of micro-batches, of the last step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from allranks.strategies.shards import rows_of
from allranks.tools.check.causes.cause import Account, Evidence, ShardPart
from allranks.tools.check.causes.updates import Weighing, instead


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
