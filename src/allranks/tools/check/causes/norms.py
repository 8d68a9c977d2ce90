"""The norm of a sharded gradient: squares that are left out of it, or counted twice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from allranks.tools.check.causes.cause import NUMBER, Account, Evidence, ShardPart
from allranks.tools.check.sizes import Array
from allranks.training.record.trace import START


def _squares(evidence: Evidence) -> list[tuple[float, float]]:
    """Of each rank: the squares of what it holds parts of, and of what it holds whole."""
    rows = [rank[evidence.step] for rank in evidence.ours.ranks]
    squares = [row.get("own_squares", {}).get("gradient", {}) for row in rows]
    return [(square["cut"], square["whole"]) for square in squares if square]


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
            yield _instead(evidence, says, cut + whole, ranks)


def whole_by_each(evidence: Evidence) -> Iterator[Account]:
    """What several ranks hold whole is counted by each of them."""
    each = _squares(evidence)
    if len(each) != evidence.ranks or evidence.ranks < 2:
        return
    total = _total(evidence)
    whole = max(squares for _, squares in each)
    for axis, size in [*evidence.axes.items(), ("all", evidence.ranks)]:
        says = (
            f"weights that all {size} ranks along {axis!r} hold whole are counted by each of them"
        )
        yield _instead(evidence, says, total + (size - 1) * whole, evidence.mesh.group(0, axis))
        says = f"what all {size} ranks along {axis!r} hold is counted by each of them"
        yield _instead(evidence, says, size * total, evidence.mesh.group(0, axis))


def _total(evidence: Evidence) -> float:
    return float(evidence.wanted_row["grad_norm"]) ** 2


def _instead(evidence: Evidence, says: str, squares: float, ranks: tuple[int, ...]) -> Account:
    length, right = float(evidence.row()["grad_norm"]), float(evidence.wanted_row["grad_norm"])
    ratio = length / right if right else None
    return Account(says, {NUMBER: length - math.sqrt(squares) + right}, ratio, ranks)


# --- starts --------------------------------------------------------------------------------------
# Weights that differ before the first step, and weights that layers share.


def parts_of_the_first(evidence: Evidence) -> Iterator[Account]:
    """Every rank begins with the part of rank 0 instead of its own."""
    if evidence.step != START:
        return
    ours, wanted = evidence.actual(evidence.stage), evidence.wanted(evidence.stage)
    repaired = {}
    for name in evidence.differing:
        if name not in ours or name not in wanted:
            return
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


# --- buffers -------------------------------------------------------------------------------------
# Running statistics of BatchNorm that are those of some samples, or updated too often.


KINDS = ("running_mean", "running_var")


def _moments(parts: Iterable[ShardPart], layer: str) -> list[Array] | None:
    """The mean and the variance of a layer over these parts, weighted; `None` if it saw none."""
    key = f"moments/{layer}"
    moments = [part.tensors[key] for part in parts if key in part.tensors]
    total = np.asarray(sum(moments), np.float64)
    if not moments or total[0] <= 0:
        return None
    return np.split(total[1:] / total[0], 2)


def of_one_rank(evidence: Evidence) -> Iterator[Account]:
    """They are updated with what one rank has seen."""
    parts, names = evidence.parts, [n for n in evidence.differing if _kind(n) in KINDS]
    if parts is None or not names or len(parts.by_rank) < 2:
        return
    ours, before, wanted = (
        evidence.actual("buffer"),
        evidence.before("buffer"),
        evidence.wanted("buffer"),
    )
    before = before or {n: t for n, t in _start(evidence).items()}
    for rank, pieces in parts.by_rank.items():
        repaired = {}
        for name in names:
            layer, kind = name.rpartition(".")[0], KINDS.index(_kind(name))
            whole, part = _moments(parts.each, layer), _moments(pieces, layer)
            if whole is None or part is None or name not in before:
                break
            rate = _rate(before[name], wanted[name], whole[kind])
            repaired[name] = ours[name] - rate * (part[kind] - whole[kind])
        if len(repaired) == len(names):
            says = f"BatchNorm's running statistics are those of what rank {rank} has seen"
            yield Account(says, repaired, None, (rank,), tuple(names))


def updated_twice(evidence: Evidence) -> Iterator[Account]:
    """They are updated several times in a step, once for each pass or rank."""
    parts, names = evidence.parts, [n for n in evidence.differing if _kind(n) in KINDS]
    if parts is None or not names:
        return
    ours, wanted = evidence.actual("buffer"), evidence.wanted("buffer")
    before = evidence.before("buffer") or _start(evidence)
    for times in sorted({2, evidence.ranks, len(parts.by_micro)} - {1}):
        repaired = {}
        for name in names:
            whole = _moments(parts.each, name.rpartition(".")[0])
            if whole is None or name not in before:
                break
            mean = whole[KINDS.index(_kind(name))]
            rate = _rate(before[name], wanted[name], mean)
            often = 1 - (1 - rate) ** times
            repaired[name] = ours[name] - (often - rate) * (mean - before[name])
        if len(repaired) == len(names):
            says = f"BatchNorm's running statistics are updated {times} times in one step"
            yield Account(says, repaired, float(times), (), tuple(names))


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _start(evidence: Evidence) -> dict[str, Array]:
    stage = "buffer/"
    tensors = evidence.right.start.items()
    return {name.removeprefix(stage): t for name, t in tensors if name.startswith(stage)}


def _rate(before: Array, after: Array, mean: Array) -> float:
    """How far one process goes from its statistics to those of the step."""
    way = (mean - before).astype(np.float64).ravel()
    square = float(way @ way)
    return float((after - before).astype(np.float64).ravel() @ way) / square if square else 0.0
