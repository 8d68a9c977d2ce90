"""The end of the fixed tree where ranks share memory: one sum of all their roots, where they lie.

Every rank adds up its chunk of all roots along the tree, and writes it to every rank: the work of a
plain sum. The last root of a rank lies in the bucket itself, others in memory beside it: there are
none where the ranks are siblings in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from allranks.strategies.reduction_tree import (
    merges,
    rounds_of_pairs,
    subtree_roots,
    uses_pairs,
)
from allranks.strategies.shards import owned_shards
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.shared_memory.in_place import addresses_of, plan_of_sum


class TreeInPlace:
    """The sums of buckets over the ranks of `comm`, who share memory."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self._spans = [
            subtree_roots(owned_shards(shards, comm.size, rank), shards)
            for rank in range(comm.size)
        ]
        self._order = merges(tuple(span for spans in self._spans for span in spans), shards)
        self._leaves: list[list[int]] = []

    def prepare(self, flats: Sequence[Tensor]) -> None:
        """Learn the buckets; every rank calls this."""
        most = max(len(spans) for spans in self._spans)
        self._flats = list(flats)
        self._beside = [[self.comm.zeros(f.numel(), f) for _ in range(most - 1)] for f in flats]
        self._leaves = [
            self._places(flat, beside)
            for flat, beside in zip(self._flats, self._beside, strict=True)
        ]

    def _places(self, flat: Tensor, beside: list[Tensor]) -> list[int]:
        """Where each root of each rank lies; nothing if not all can read all of them."""
        own, *others = [addresses_of(self.comm.of_torch, one) for one in (flat, *beside)]
        if not all([own, *others]):
            return []
        return [
            (own if root == len(spans) - 1 else others[root])[rank]
            for rank, spans in enumerate(self._spans)
            for root in range(len(spans))
        ]

    def has(self, bucket: int) -> bool:
        """Whether all ranks can read this bucket."""
        return bool(self._leaves[bucket])

    def begin(self, bucket: int, roots: Sequence[Tensor]) -> Pending:
        """Begin the sum of a bucket, of which this rank holds these roots, the last one in it.

        Counted as what the messages of a tree would be.
        """
        flat, size = self._flats[bucket], self.comm.size
        for place, root in zip(self._beside[bucket], roots[:-1], strict=False):
            place.copy_(root)
        sent = (len(roots) + 1) * flat.nbytes * (size - 1) / size
        if uses_pairs(self.shards, size, flat.nbytes):
            sent = flat.nbytes * (rounds_of_pairs(self.shards, size) or 0)
        plan = plan_of_sum(self.comm.of_torch, flat, self._leaves[bucket], self._order)
        return self.comm.begin_sum(plan, sent)
