"""Weights that differ before the first step, and weights that layers share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from allranks.tools.check.causes.cause import Account
from allranks.tools.check.causes.evidence import Evidence
from allranks.training.record.trace import START


def parts_of_the_first(evidence: Evidence) -> Iterator[Account]:
    """Every rank begins with the part of the first, where it should have its own."""
    if evidence.step != START:
        return
    ours, wanted = evidence.found(evidence.stage), evidence.wanted(evidence.stage)
    repaired = {}
    for name in evidence.differing:
        if name not in ours or name not in wanted:
            return
        found = ours[name].copy()
        for axis in range(found.ndim):
            rows = -(-found.shape[axis] // evidence.ranks)
            first = np.take(wanted[name], range(min(rows, found.shape[axis])), axis)
            tiled = np.concatenate([first] * evidence.ranks, axis)
            tiled = np.take(tiled, range(found.shape[axis]), axis)
            if np.array_equal(found, tiled):
                repaired[name] = found - tiled + wanted[name]
                break
    if evidence.differing and len(repaired) == len(evidence.differing):
        says = "every rank begins with the part of a weight that belongs to rank 0"
        yield Account(says, repaired, None, tuple(range(1, evidence.ranks)))


def not_sent_at_the_start(evidence: Evidence) -> Iterator[Account]:
    """Ranks begin with weights of their own: those of one rank are those of one process."""
    if evidence.step != START or len(evidence.tensors_of_ranks) < 2:
        return
    wrong = [
        rank
        for rank in range(evidence.ranks)
        if evidence.beyond(evidence.found(evidence.stage, rank))
    ]
    right = [rank for rank in range(evidence.ranks) if rank not in wrong]
    if right and wrong:
        own = evidence.found(evidence.stage, right[0])
        repaired = {name: own[name] for name in evidence.differing if name in own}
        says = f"ranks {wrong} begin with weights of their own: those of rank 0 were not sent"
        yield Account(says, repaired, None, tuple(wrong))


def untied(evidence: Evidence) -> Iterator[Account]:
    """A weight that several layers use has the gradient of one of them."""
    parts = evidence.usable
    if parts is None:
        return
    shared = [name for name in evidence.differing if name in parts.by_use]
    ours = evidence.found(evidence.stage)
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
