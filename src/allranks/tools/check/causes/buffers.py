"""Running statistics of BatchNorm that are those of some samples, or updated too often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from allranks.tools.check.causes.cause import Account
from allranks.tools.check.causes.evidence import Evidence, Part
from allranks.tools.check.sizes import Array

KINDS = ("running_mean", "running_var")


def _moments(parts: Iterable[Part], layer: str) -> list[Array] | None:
    """The mean and the variance of a layer over these parts, weighted; `None` if it saw none."""
    own = [part.tensors[f"moments/{layer}"] for part in parts if f"moments/{layer}" in part.tensors]
    total = np.asarray(sum(own), np.float64)
    if not own or total[0] <= 0:
        return None
    return np.split(total[1:] / total[0], 2)


def of_one_rank(evidence: Evidence) -> Iterator[Account]:
    """They are updated with what one rank has seen."""
    parts, names = evidence.parts, [n for n in evidence.differing if _kind(n) in KINDS]
    if parts is None or not names or len(parts.by_rank) < 2:
        return
    ours, before, wanted = (
        evidence.found("buffer"),
        evidence.before("buffer"),
        evidence.wanted("buffer"),
    )
    before = before or {n: t for n, t in _start(evidence).items()}
    for rank, own in parts.by_rank.items():
        repaired = {}
        for name in names:
            layer, kind = name.rpartition(".")[0], KINDS.index(_kind(name))
            whole, part = _moments(parts.each, layer), _moments(own, layer)
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
    ours, wanted = evidence.found("buffer"), evidence.wanted("buffer")
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
    found = evidence.right.start.items()
    return {name.removeprefix(stage): t for name, t in found if name.startswith(stage)}


def _rate(before: Array, after: Array, mean: Array) -> float:
    """How far one process goes from its statistics to those of the step."""
    way = (mean - before).astype(np.float64).ravel()
    square = float(way @ way)
    return float((after - before).astype(np.float64).ravel() @ way) / square if square else 0.0
