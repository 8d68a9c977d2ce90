"""Sums along one fixed binary tree over all shards, whoever owns them: equal bits on any ranks.

Inside a rank, shard gradients are added as soon as both children of a node are there. The ranks
finish the tree from the roots of the complete subtrees that they hold, in one of two ways:

* in pairs, where ranks are siblings in the tree and the bucket is small: round k sums over two
  ranks, 2^k apart, and log2(N) rounds are all there is to wait for;
* in chunks otherwise: an all-to-all gives chunk r of every root of every rank to rank r, which
  finishes the tree for its chunk, and an all-gather brings the sums together.

Nothing is divided here: 1/3 is not exact.
"""

from __future__ import annotations

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
from allranks.torch.comm import Comm, Pending
from allranks.torch.reducers.base import Reducer


class TreeSum:
    """Adds what belongs to the nodes of the tree, given from left to right.

    Holds at most one partial sum per level of the tree. What is added is borrowed: it is copied
    where it must be kept.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.roots: list[tuple[Span, list[Tensor]]] = []

    def add(self, span: Span, tensors: list[Tensor]) -> None:
        borrowed = True
        while self.roots and are_siblings(self.roots[-1][0], span, self.shards):
            (low, _), left = self.roots.pop()
            for total, tensor in zip(left, tensors, strict=True):
                total.add_(tensor)
            span, tensors, borrowed = (low, span[1]), left, False
        self.roots.append((span, [t.clone() for t in tensors] if borrowed else tensors))

    def total(self) -> list[Tensor]:
        """The sum over all shards, once every shard was added."""
        ((span, tensors),) = self.roots
        assert span == (0, self.shards), span
        return tensors


class Tree(Reducer):
    """Fixed order of sums. Sends what the card of `ddp` says for `reduce=tree`."""

    def __init__(self, comm: Comm, shards: int) -> None:
        super().__init__(comm, shards)
        self._trees: dict[int, TreeSum] = {}
        self._under_way: list[_Exchange] = []
        self._roots = [
            subtree_roots(owned_shards(shards, comm.size, rank), shards)
            for rank in range(comm.size)
        ]
        rounds = rounds_of_pairs(shards, comm.size) or 0
        self._pairs = [comm.pair(comm.rank ^ (1 << k)) for k in range(rounds)]

    @property
    def multiple(self) -> int:
        return self.comm.size

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
            tree.add(leaf, [flat])
            roots = [tensors[0] for _, tensors in tree.roots]
        if self.comm.size == 1:
            exchange = _Exchange(flat, roots[0], Pending())
        elif uses_pairs(self.shards, self.comm.size, flat.nbytes):
            first = self.comm.add_in_pair(roots[0], self._pairs[0])
            exchange = _Exchange(flat, roots[0], first, in_pairs=True)
        else:
            exchange = self._give_chunks(flat, roots)
        self._under_way.append(exchange)

    def _give_chunks(self, flat: Tensor, roots: list[Tensor]) -> _Exchange:
        """Send chunk r of every root to rank r."""
        chunk = flat.numel() // self.comm.size
        given = roots[0]
        if len(roots) > 1:  # (root, rank, chunk) -> (rank, root, chunk)
            given = torch.stack([root.view(-1, chunk) for root in roots], dim=1).flatten()
        sizes = [len(spans) * chunk for spans in self._roots]
        received = flat.new_empty(sum(sizes))
        own = [len(roots) * chunk] * self.comm.size
        return _Exchange(flat, received, self.comm.all_to_all(received, given, sizes, own))

    def finish(self) -> None:
        for exchange in self._under_way:
            exchange.pending.wait()
            if self.comm.size > 1 and not exchange.in_pairs:
                exchange.pending = self.comm.all_gather(exchange.flat, self._total(exchange))
        paired = [exchange for exchange in self._under_way if exchange.in_pairs]
        for pair in self._pairs[1:]:
            for exchange in paired:
                exchange.pending = self.comm.add_in_pair(exchange.held, pair)
            for exchange in paired:
                exchange.pending.wait()
        for exchange in self._under_way:
            exchange.pending.wait()
            if (self.comm.size == 1 or exchange.in_pairs) and exchange.held is not exchange.flat:
                exchange.flat.copy_(exchange.held)
        self._under_way.clear()

    def _total(self, exchange: _Exchange) -> Tensor:
        """The sum over all shards of this rank's chunk."""
        spans = [span for roots in self._roots for span in roots]
        tree = TreeSum(self.shards)
        chunk = exchange.flat.numel() // self.comm.size
        for span, part in zip(spans, exchange.held.split(chunk), strict=True):
            tree.add(span, [part])
        (total,) = tree.total()
        return total


@dataclass
class _Exchange:
    """A bucket under way: `held` is this rank's root, or what it received of all roots."""

    flat: Tensor
    held: Tensor
    pending: Pending
    in_pairs: bool = False
