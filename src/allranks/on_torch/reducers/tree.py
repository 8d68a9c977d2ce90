"""Sums along one fixed binary tree over all shards, whoever owns them: equal bits on any ranks.

Inside a rank, shard gradients are added as soon as both children of a node are there. The roots of
the complete subtrees that a rank holds (one, where ranks divide the shards) are cut into N chunks;
an all-to-all gives chunk r of every root of every rank to rank r, which finishes the tree for its
chunk; an all-gather brings the sums together. Nothing is divided here: 1/3 is not exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.on_torch.comm import Comm, Pending
from allranks.on_torch.reducers.base import Reducer
from allranks.shards import owned_shards
from allranks.tree import Span, are_siblings, subtree_roots


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
    """Fixed order of sums. Sends (roots + 1)(N-1)/N of a bucket's bytes."""

    def __init__(self, comm: Comm, shards: int) -> None:
        super().__init__(comm, shards)
        self._trees: dict[int, TreeSum] = {}
        self._under_way: list[tuple[Pending, Tensor]] = []
        self._roots = [
            subtree_roots(owned_shards(shards, comm.size, rank), shards)
            for rank in range(comm.size)
        ]

    @property
    def multiple(self) -> int:
        return self.comm.size

    def add(self, bucket: int, flat: Tensor, leaf: Span) -> None:
        self._trees.setdefault(bucket, TreeSum(self.shards)).add(leaf, [flat])
        flat.zero_()

    def launch(self, bucket: int, flat: Tensor, leaf: Span) -> None:
        tree = self._trees.pop(bucket, None)
        if tree is None:  # this rank owns one shard: its root is the bucket itself
            roots = [flat]
        else:
            tree.add(leaf, [flat])
            roots = [tensors[0] for _, tensors in tree.roots]
        if self.comm.size == 1:
            self._under_way.append((Pending(), roots[0]))
            return
        chunk = flat.numel() // self.comm.size
        given = roots[0]
        if len(roots) > 1:  # (root, rank, chunk) -> (rank, root, chunk)
            given = torch.stack([root.view(-1, chunk) for root in roots], dim=1).flatten()
        sizes = [len(spans) * chunk for spans in self._roots]
        received = flat.new_empty(sum(sizes))
        own = [len(roots) * chunk] * self.comm.size
        self._under_way.append((self.comm.all_to_all(received, given, sizes, own), received))

    def finish(self, flats: list[Tensor]) -> None:
        gathers = []
        for flat, (pending, received) in zip(flats, self._under_way, strict=True):
            pending.wait()
            if self.comm.size == 1:
                if received is not flat:
                    flat.copy_(received)
                continue
            chunk = flat.numel() // self.comm.size
            spans = [span for roots in self._roots for span in roots]
            tree = TreeSum(self.shards)
            for span, part in zip(spans, received.split(chunk), strict=True):
                tree.add(span, [part])
            (total,) = tree.total()
            gathers.append(self.comm.all_gather(flat, total))
        for gather in gathers:
            gather.wait()
        self._under_way.clear()
