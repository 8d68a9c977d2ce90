"""Gradients of one unit, cut over the ranks, added along the fixed tree: equal bits on any ranks.

Every pass of every rank is a part of one leaf of the tree, or counts for nothing. After each an
all-to-all gives chunk r of what every rank has to rank r, which adds up the leaves of each rank
and, after the last pass, the whole tree for its chunk. Sends what a reduce-scatter does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.reduction_tree import Span
from allranks.strategies.shards import owned_shards
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch
from allranks.torch.reducers.tree import TreeSum

NO_LEAF = -1


class PassPlan:
    """Of which shard each pass of each rank of `comm` is, in the step that is under way.

    `holders` are the ranks that hold a model together, `replicas` those with the same part of it.
    """

    def __init__(self, comm: Comm, shards: int, holders: Comm, replicas: Comm) -> None:
        self.comm, self.shards = comm, shards
        self.holders, self.replicas = holders, replicas
        self.passes = 0
        self.rows: list[list[int]] = []
        self._trees: list[ChunkTree] = []

    def tree(self) -> ChunkTree:
        """The sums of one more unit."""
        self._trees.append(ChunkTree(self))
        return self._trees[-1]

    def begin(self, batch: Batch) -> None:
        """A step begins; every rank calls this. Sends 8 bytes for each pass to every rank."""
        own = [leaf.shards.start for leaf in batch.leaves for _ in leaf.micros]
        own += [NO_LEAF] * batch.passes_without_weight
        self.passes = len(own)
        mine = torch.tensor(own, dtype=torch.int64, device=self.comm.device)
        whole = mine.new_empty(self.comm.size * self.passes)
        if self.passes:
            self.comm.all_gather(whole, mine, "control").wait()
        with self.comm.reading():
            self.rows = whole.view(self.comm.size, self.passes).tolist()
        for tree in self._trees:
            tree.begin()

    def end(self) -> None:
        """The passes are over; raises `RequestError` if one of them was not one for a unit."""
        for tree in self._trees:
            if tree.done not in (0, self.passes):  # 0: all of it is frozen
                raise not_once_a_pass(tree.done, self.passes)


class ChunkTree:
    """The sums of one unit on this rank, step by step."""

    def __init__(self, plan: PassPlan) -> None:
        self.plan = plan
        self.done = 0

    def begin(self) -> None:
        """A step begins."""
        comm, shards = self.plan.comm, self.plan.shards
        owned = (owned_shards(shards, comm.size, rank) for rank in range(comm.size))
        self._leaves = [_Leaves(span, shards) for span in owned]
        self.done = 0

    def add(self, given: Tensor) -> Tensor | None:
        """Take in one pass: `given` is (holder, chunk), flat.

        Returns the total after the last pass, to the first of the replicas alone: what the others
        add to it is nothing. Every rank calls this. Sends (K-1)/K of `given` to K holders, and
        (R-1) times as much as it to R replicas.
        """
        plan = self.plan
        if self.done == plan.passes:
            raise not_once_a_pass(self.done + 1, plan.passes)
        chunks = self._exchanged(given).view(plan.comm.size, -1)
        for rank, leaves in enumerate(self._leaves):
            leaves.add(plan.rows[rank][self.done], chunks[rank])
        self.done += 1
        if self.done < plan.passes:
            return None
        whole = TreeSum(plan.shards)
        for leaves in self._leaves:
            for span, tensors in leaves.roots(like=chunks[0]):
                whole.add(span, tensors)
        self._leaves = []
        return whole.total()[0] if plan.replicas.rank == 0 else None

    def _exchanged(self, given: Tensor) -> Tensor:
        """This rank's chunk of what every rank has given, in rank order."""
        holders, replicas = self.plan.holders, self.plan.replicas
        received = torch.empty_like(given)
        sizes = [given.numel() // holders.size] * holders.size
        holders.all_to_all(received, given, sizes, sizes).wait()
        if replicas.size == 1:
            return received
        every = received.new_empty(replicas.size * received.numel())
        replicas.all_gather(every, received).wait()
        return every


def not_once_a_pass(found: int, passes: int) -> RequestError:
    """The error for a part of the model that is not called once in every forward pass."""
    return RequestError(
        asked="equal bits on any number of ranks (reduce=tree)",
        found=f"a block of the model with {found} gradients in {passes} passes: it is not called "
        "once in every pass",
        why="each pass is a part of one leaf of the tree",
        do="leave that block out of fsdp_units(model) in the task, or drop --bitwise",
    )


class _Leaves:
    """What one rank has sent so far: the roots of its part of the tree, and a leaf in progress."""

    def __init__(self, owned: range, shards: int) -> None:
        self._tree = TreeSum(shards)
        self._ahead = list(owned)
        self._leaf: Tensor | None = None

    def add(self, shard: int, chunk: Tensor) -> None:
        if shard == NO_LEAF:
            return
        while self._ahead[0] != shard:
            self._close(chunk)
        if self._leaf is None:
            self._leaf = torch.zeros_like(chunk)  # as in one process: no leaf begins with -0.0
        self._leaf.add_(chunk)

    def roots(self, like: Tensor) -> list[tuple[Span, list[Tensor]]]:
        """Once all has come: shards without a sample are zeros."""
        while self._ahead:
            self._close(like)
        return self._tree.roots

    def _close(self, like: Tensor) -> None:
        shard, leaf = self._ahead.pop(0), self._leaf
        self._tree.add((shard, shard + 1), [torch.zeros_like(like) if leaf is None else leaf])
        self._leaf = None
