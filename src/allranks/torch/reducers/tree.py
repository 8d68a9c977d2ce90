"""Sums along one fixed binary tree over all shards, whoever owns them: equal bits on any ranks.

Inside a rank, shard gradients are added as soon as both children of a node are there. The ranks
finish the tree from the roots of the complete subtrees that they hold, in one of three ways:

* in place, where ranks share memory: each adds up its chunk of all roots and writes it to all;
* in pairs, where ranks are siblings in the tree and the bucket is small: round k sums over two
  ranks, 2^k apart, and log2(N) rounds are all there is to wait for;
* in chunks otherwise: an all-to-all gives chunk r of every root of every rank to rank r, which
  finishes the tree for its chunk, and an all-gather brings the sums together.

Nothing is divided here: 1/3 is not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import (
    Span,
    are_siblings,
    rounds_of_pairs,
    subtree_roots,
    uses_pairs,
)
from allranks.strategies.shards import owned_shards
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.reducers.base import Bucket, Reducer
from allranks.torch.reducers.tree_in_place import TreeInPlace
from allranks.torch.shared_memory.in_place import share_memory


class TreeSum:
    """Adds what belongs to the nodes of the tree, given from left to right.

    Holds at most one partial sum per level of the tree. What is added is `borrowed`, and copied
    where it must be kept, or given away: then the node that it completes lies there.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.roots: list[tuple[Span, list[Tensor]]] = []

    def add(self, span: Span, tensors: list[Tensor], *, borrowed: bool = True) -> None:
        while self.roots and are_siblings(self.roots[-1][0], span, self.shards):
            (low, _), left = self.roots.pop()
            into, other = (left, tensors) if borrowed else (tensors, left)
            for total, tensor in zip(into, other, strict=True):
                total.add_(tensor)  # of two numbers the order is free
            span, tensors, borrowed = (low, span[1]), into, False
        self.roots.append((span, [t.clone() for t in tensors] if borrowed else tensors))

    def total(self) -> list[Tensor]:
        """The sum over all shards, once every shard was added."""
        ((span, tensors),) = self.roots
        assert span == (0, self.shards), span
        return tensors


class TreeChunks:
    """The end of the tree over the ranks of `comm`: chunk r of every sum is finished by rank r."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self._roots = [
            subtree_roots(owned_shards(shards, comm.size, rank), shards)
            for rank in range(comm.size)
        ]

    def give(self, roots: list[Tensor]) -> tuple[Tensor, Pending]:
        """Send chunk r of each of this rank's roots to rank r; what comes is for `total`."""
        chunk = roots[0].numel() // self.comm.size
        given = roots[0]
        if len(roots) > 1:  # (root, rank, chunk) -> (rank, root, chunk)
            given = torch.stack([root.view(-1, chunk) for root in roots], dim=1).flatten()
        sizes = [len(spans) * chunk for spans in self._roots]
        received = given.new_empty(sum(sizes))
        own = [len(roots) * chunk] * self.comm.size
        return received, self.comm.all_to_all(received, given, sizes, own)

    def total(self, received: Tensor, chunk: int) -> Tensor:
        """The sum over all shards of this rank's chunk, once all roots were received."""
        spans = [span for roots in self._roots for span in roots]
        tree = TreeSum(self.shards)
        for span, part in zip(spans, received.split(chunk), strict=True):
            tree.add(span, [part])
        return tree.total()[0]


class Tree(Reducer):
    """Fixed order of sums. Sends what the card of `ddp` says for `reduce=tree`."""

    def __init__(self, comm: Comm, shards: int) -> None:
        super().__init__(comm, shards)
        self._trees: dict[int, TreeSum] = {}
        self._under_way: list[_Exchange] = []
        self._chunks = TreeChunks(comm, shards)
        self._in_place = TreeInPlace(comm, shards) if share_memory(comm.of_torch) else None
        rounds = rounds_of_pairs(shards, comm.size) or 0
        pairs = 0 if self._in_place else rounds
        self._pairs = [comm.pair(comm.rank ^ (1 << k)) for k in range(pairs)]

    @property
    def multiple(self) -> int:
        return self.comm.size

    def room(self, count: int, like: Tensor) -> Tensor:
        return self.comm.zeros(-(-count // self.multiple) * self.multiple, like)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        if self._in_place:
            self._in_place.prepare([bucket.flat for bucket in buckets])

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        flat = self.buckets[bucket].flat
        if not last:
            self._trees.setdefault(bucket, TreeSum(self.shards)).add(leaf, [flat])
            flat.zero_()
            return
        tree = self._trees.pop(bucket, None)
        if tree is None:  # this rank owns one shard: its root is the bucket itself
            roots = [flat]
        else:
            tree.add(leaf, [flat], borrowed=False)
            roots = [tensors[0] for _, tensors in tree.roots]
        if self.comm.size == 1:
            exchange = _Exchange(flat, roots[0], Pending())
        elif self._in_place and self._in_place.has(bucket):
            exchange = _Exchange(flat, flat, self._in_place.begin(bucket, roots), is_whole=True)
        elif self._pairs and uses_pairs(self.shards, self.comm.size, flat.nbytes):
            first = self.comm.add_in_pair(roots[0], self._pairs[0])
            exchange = _Exchange(flat, roots[0], first, in_pairs=True, is_whole=True)
        else:
            exchange = _Exchange(flat, *self._chunks.give(roots))
        self._under_way.append(exchange)

    def finish(self) -> None:
        for exchange in self._under_way:
            exchange.pending.wait()
            if self.comm.size > 1 and not exchange.is_whole:
                chunk = exchange.flat.numel() // self.comm.size
                total = self._chunks.total(exchange.held, chunk)
                exchange.pending = self.comm.all_gather(exchange.flat, total)
        paired = [exchange for exchange in self._under_way if exchange.in_pairs]
        for pair in self._pairs[1:]:
            for exchange in paired:
                exchange.pending = self.comm.add_in_pair(exchange.held, pair)
            for exchange in paired:
                exchange.pending.wait()
        for exchange in self._under_way:
            exchange.pending.wait()
            if exchange.in_pairs and exchange.held is not exchange.flat:
                exchange.flat.copy_(exchange.held)
        self._under_way.clear()


@dataclass
class _Exchange:
    """A bucket under way: `held` is this rank's root, or what it received of all roots.

    Where it `is_whole` the sum comes whole, not by chunks.
    """

    flat: Tensor
    held: Tensor
    pending: Pending
    in_pairs: bool = False
    is_whole: bool = False
