"""The length of a gradient of which ranks hold parts: what is left out of it, or counted twice."""

from __future__ import annotations

import math
from collections.abc import Iterator

from allranks.tools.check.causes.cause import NUMBER, Account
from allranks.tools.check.causes.evidence import Evidence


def _squares(evidence: Evidence) -> list[tuple[float, float]]:
    """Of each rank: the squares of what it holds parts of, and of what it holds whole."""
    rows = [rank[evidence.step] for rank in evidence.ours.ranks]
    found = [row.get("own_squares", {}).get("gradient", {}) for row in rows]
    return [(own["cut"], own["whole"]) for own in found if own]


def of_some_ranks(evidence: Evidence) -> Iterator[Account]:
    """The squares of one rank's parts, or of those along one axis, are never added to the rest."""
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
    whole = max(own for _, own in each)
    for axis, size in [*evidence.axes.items(), ("all", evidence.ranks)]:
        says = (
            f"weights that all {size} ranks along {axis!r} hold whole are counted by each of them"
        )
        yield _instead(evidence, says, total + (size - 1) * whole, evidence.mesh.group(0, axis))
        says = f"what all {size} ranks along {axis!r} hold is counted by each of them"
        yield _instead(evidence, says, size * total, evidence.mesh.group(0, axis))


def _total(evidence: Evidence) -> float:
    return float(evidence.wanted_row["grad_norm"]) ** 2


def _instead(evidence: Evidence, says: str, made: float, ranks: tuple[int, ...]) -> Account:
    found, right = float(evidence.row()["grad_norm"]), float(evidence.wanted_row["grad_norm"])
    ratio = found / right if right else None
    return Account(says, {NUMBER: found - math.sqrt(made) + right}, ratio, ranks)
