"""What common ways to sum cost, for the cards: bytes that the busiest rank sends in a step, and
what a rank stores that has all of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from allranks.strategies.card import Contents, Stored, Workload
from allranks.strategies.reduction_tree import rounds_of_pairs, subtree_roots, uses_pairs
from allranks.strategies.shards import owned_shards


def no_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Nothing is sent."""
    return 0


def ring_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """A ring all-reduce of every message: 2(N-1)/N of its bytes."""
    return round(2 * (work.ranks - 1) / work.ranks * sum(work.messages))


def _all_stored(has: Contents, options: Mapping[str, Any]) -> float:
    """Weights, gradients, and what the optimizer keeps."""
    return (2 + has.kept) * (has.cut + has.rest)


EVERYTHING = Stored("(2 + k)(C + R)", _all_stored)
RING = "2(N-1)/N · (gradients + tally)"


def tree_roots(work: Workload) -> int:
    """How many roots of the tree over all shards the rank with the most of them holds."""
    owned = (owned_shards(work.shards, work.ranks, rank) for rank in range(work.ranks))
    return max(len(subtree_roots(span, work.shards)) for span in owned)


def tree_bytes(work: Workload, messages: Iterable[int]) -> int:
    """Each message in rounds of pairs, or by all-to-all of roots and all-gather of sums."""
    if work.ranks == 1:
        return 0
    sent = 0.0
    for message in messages:
        if uses_pairs(work.shards, work.ranks, message):
            sent += (rounds_of_pairs(work.shards, work.ranks) or 0) * message
        else:
            sent += (tree_roots(work) + 1) * (work.ranks - 1) / work.ranks * message
    return round(sent)
