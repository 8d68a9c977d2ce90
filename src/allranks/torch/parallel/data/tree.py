"""Sums along one fixed binary tree over all shards: equal bits on any number of ranks.

Inside a rank, shard gradients are added as soon as both children of a node are complete. The ranks
finish the tree from the roots of their complete subtrees, in one of three ways:

* in place, if ranks share memory: each adds its chunk of all roots and writes it to all ranks;
* in pairs, if ranks are siblings in the tree and the bucket is small: round k sums over two ranks
  at distance 2^k, so there are log2(N) rounds;
* in chunks otherwise: an all-to-all sends chunk r of every root of every rank to rank r, which
  finishes the tree for its chunk; an all-gather distributes the sums.

Nothing is divided here: 1/3 is not exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.reduction_tree import (
    Span,
    are_siblings,
    merges,
    roots_of_ranks,
    rounds_of_pairs,
    uses_pairs,
)
from allranks.strategies.shards import Shares
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.data.batch import Batch
from allranks.torch.parallel.data.half import PackedBucket
from allranks.torch.parallel.data.reducer import Bucket, Reducer
from allranks.torch.shared_memory.in_place import addresses_of, plan_of_sum, share_memory

# --- tree in place -------------------------------------------------------------------------------
# The end of the fixed tree for ranks that share memory: one sum of all their roots, in place.
#
# Every rank adds its chunk of all roots along the tree, and writes it to every rank: the work of a
# plain sum. The last root of a rank is the bucket itself; others are in extra memory. There are no
# others if the ranks are siblings in the tree.


class TreeInPlace:
    """Sums buckets over the ranks of `comm`, which share memory."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self._flats: list[Tensor] = []
        self._extra: list[list[Tensor]] = []
        self.deal(Shares.even(shards, comm.size))

    def prepare(self, flats: Sequence[Tensor]) -> None:
        """Set the buckets; every rank calls this."""
        self._flats, self._extra = list(flats), [[] for _ in flats]
        self.deal(self.shares)

    def deal(self, shares: Shares) -> None:
        """Set the shards of each rank; every rank calls this. Roots keep the memory they have."""
        self.shares, self._spans = shares, roots_of_ranks(shares)
        self._order = merges(tuple(s for spans in self._spans for s in spans), self.shards)
        most = max(map(len, self._spans))
        for flat, extra in zip(self._flats, self._extra, strict=True):
            extra += [self.comm.zeros(flat.numel(), flat) for _ in range(most - 1 - len(extra))]
        self._leaves: list[list[int]] = [
            self._places(flat, extra) for flat, extra in zip(self._flats, self._extra, strict=True)
        ]

    def _places(self, flat: Tensor, extra: list[Tensor]) -> list[int]:
        """The address of each root of each rank; empty unless all ranks can read all of them."""
        in_bucket, *others = [addresses_of(self.comm.of_torch, tensor) for tensor in (flat, *extra)]
        if not all([in_bucket, *others]):
            return []
        return [
            (in_bucket if root == len(spans) - 1 else others[root])[rank]
            for rank, spans in enumerate(self._spans)
            for root in range(len(spans))
        ]

    def has(self, bucket: int) -> bool:
        """Whether all ranks can read this bucket."""
        return bool(self._leaves[bucket])

    def begin(self, bucket: int, roots: Sequence[Tensor]) -> Pending:
        """Begin the sum of a bucket; this rank holds these roots, the last one in the bucket.

        Counts the bytes that the messages of a tree would have.
        """
        flat, size = self._flats[bucket], self.comm.size
        for place, root in zip(self._extra[bucket], roots[:-1], strict=False):
            place.copy_(root)
        sent_bytes = (len(roots) + 1) * flat.nbytes * (size - 1) / size
        if self.shares.are_even and uses_pairs(self.shards, size, flat.nbytes):
            sent_bytes = flat.nbytes * (rounds_of_pairs(self.shards, size) or 0)
        plan = plan_of_sum(self.comm.of_torch, flat, self._leaves[bucket], self._order)
        return self.comm.begin_sum(plan, sent_bytes)


class TreeSum:
    """Adds tensors for the nodes of the tree, from left to right.

    Holds at most one partial sum per level of the tree. A `borrowed` tensor is copied if it must be
    kept; otherwise its memory is used for the node that it completes.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.roots: list[tuple[Span, list[Tensor]]] = []

    def add(self, span: Span, tensors: list[Tensor], *, borrowed: bool = True) -> None:
        while self.roots and are_siblings(self.roots[-1][0], span, self.shards):
            (low, _), earlier = self.roots.pop()
            into, other = (earlier, tensors) if borrowed else (tensors, earlier)
            for total, tensor in zip(into, other, strict=True):
                total.add_(tensor)  # of two numbers the order is free
            span, tensors, borrowed = (low, span[1]), into, False
        self.roots.append((span, [t.clone() for t in tensors] if borrowed else tensors))

    def total(self) -> list[Tensor]:
        """The sum over all shards, after every shard was added."""
        ((span, tensors),) = self.roots
        assert span == (0, self.shards), span
        return tensors


class TreeChunks:
    """The end of the tree over the ranks of `comm`: rank r finishes chunk r of every sum."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self.deal(Shares.even(shards, comm.size))

    def deal(self, shares: Shares) -> None:
        """Set the shards of each rank."""
        self._roots = roots_of_ranks(shares)

    def send_roots(self, roots: list[Tensor]) -> tuple[Tensor, Pending]:
        """Send chunk r of each of this rank's roots to rank r; returns the input of `total`."""
        chunk = roots[0].numel() // self.comm.size
        outgoing = roots[0]
        if len(roots) > 1:  # (root, rank, chunk) -> (rank, root, chunk)
            outgoing = torch.stack([root.view(-1, chunk) for root in roots], dim=1).flatten()
        sizes = [len(spans) * chunk for spans in self._roots]
        received = outgoing.new_empty(sum(sizes))
        send_sizes = [len(roots) * chunk] * self.comm.size
        return received, self.comm.all_to_all(received, outgoing, sizes, send_sizes)

    def total(self, received: Tensor, chunk: int) -> Tensor:
        """The sum of this rank's chunk over all shards, after all roots were received."""
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
        self._chunks = TreeChunks(comm, shards)
        self._in_place = TreeInPlace(comm, shards) if share_memory(comm.of_torch) else None
        rounds = rounds_of_pairs(shards, comm.size) or 0
        pairs = 0 if self._in_place else rounds
        self._pairs = [comm.pair(comm.rank ^ (1 << k)) for k in range(pairs)]
        self._in_pairs = bool(self._pairs)

    def deal(self, shares: Shares) -> None:
        self._in_pairs = bool(self._pairs) and shares.are_even
        self._chunks.deal(shares)
        if self._in_place:
            self._in_place.deal(shares)

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
        if self.comm.size > 1:
            self.advance(self._joined(bucket, roots))
        roots.clear()  # sent from copies, or from the bucket

    def _joined(self, bucket: int, roots: list[Tensor]) -> Iterator[Pending]:
        """Finish the tree over the ranks, of which this one holds `roots`."""
        flat = self.buckets[bucket].flat
        if self._in_place and self._in_place.has(bucket):
            yield self._in_place.begin(bucket, roots)
        elif self._in_pairs and uses_pairs(self.shards, self.comm.size, flat.nbytes):
            # this rank has one root, completed by the last leaf, whose memory is the bucket
            for pair in self._pairs:
                yield self.comm.add_in_pair(flat, pair)
        else:
            received, pending = self._chunks.send_roots(roots)
            yield pending
            total = self._chunks.total(received, flat.numel() // self.comm.size)
            yield self.comm.all_gather(flat, total)


# --- chunk tree ----------------------------------------------------------------------------------
# Gradients of one unit, cut over the ranks, added along the fixed tree: equal bits on any ranks.
#
# Every pass of every rank is a part of one leaf of the tree, or is ignored. After each pass an
# all-to-all sends chunk r of every rank's gradients to rank r. It adds the leaves of each rank and,
# after the last pass, the whole tree for its chunk. Sends as much as a reduce-scatter.


NO_LEAF = -1


class PassPlan:
    """The shard of each pass of each rank of `comm`, in the current step.

    `holders` are the ranks that hold a model together, `replicas` those with the same part of it.
    """

    def __init__(self, comm: Comm, shards: int, holders: Comm, replicas: Comm) -> None:
        self.comm, self.shards = comm, shards
        self.holders, self.replicas = holders, replicas
        self.shares = Shares.even(shards, comm.size)
        self.passes = 0
        self.rows: list[list[int]] = []
        self._trees: list[ChunkTree] = []

    def tree(self) -> ChunkTree:
        """The sums of another unit."""
        self._trees.append(ChunkTree(self))
        return self._trees[-1]

    def begin(self, batch: Batch) -> None:
        """Begin a step; every rank calls this. Sends 8 bytes for each pass to every rank."""
        leaf_of_pass = [leaf.shards.start for leaf in batch.leaves for _ in leaf.micros]
        leaf_of_pass += [NO_LEAF] * batch.passes_without_weight
        self.passes = len(leaf_of_pass)
        mine = torch.tensor(leaf_of_pass, dtype=torch.int64, device=self.comm.device)
        whole = mine.new_empty(self.comm.size * self.passes)
        if self.passes:
            self.comm.all_gather(whole, mine, "control").wait()
        with self.comm.reading():
            self.rows = whole.view(self.comm.size, self.passes).tolist()
        for tree in self._trees:
            tree.begin()

    def end(self) -> None:
        """End the passes; raises `RequestError` if a unit was not called once in each."""
        for tree in self._trees:
            if tree.done not in (0, self.passes):  # 0: all of it is frozen
                raise not_once_a_pass(tree.done, self.passes)


class ChunkTree:
    """The sums of one unit on this rank, step by step."""

    def __init__(self, plan: PassPlan) -> None:
        self.plan = plan
        self.done = 0

    def begin(self) -> None:
        """Begin a step."""
        plan = self.plan
        self._leaves = [_Leaves(span, plan.shards) for span in plan.shares.runs]
        self.done = 0

    def add(self, gradients: Tensor) -> Tensor | None:
        """Add the gradients of one pass, (holder, chunk), flat.

        After the last pass it returns the total, but only on the first of the replicas. Every rank
        calls this. Sends (K-1)/K of `gradients` to K holders, and (R-1) times all of it to R
        replicas.
        """
        plan = self.plan
        if self.done == plan.passes:
            raise not_once_a_pass(self.done + 1, plan.passes)
        chunks = self._exchanged(gradients).view(plan.comm.size, -1)
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

    def _exchanged(self, gradients: Tensor) -> Tensor:
        """This rank's chunk of the gradients of every rank, in rank order."""
        holders, replicas = self.plan.holders, self.plan.replicas
        received = torch.empty_like(gradients)
        sizes = [gradients.numel() // holders.size] * holders.size
        holders.all_to_all(received, gradients, sizes, sizes).wait()
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
    """One rank's part of the tree: the roots so far, and the current leaf."""

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
        """The roots after the last pass; shards without a sample are zeros."""
        while self._ahead:
            self._close(like)
        return self._tree.roots

    def _close(self, like: Tensor) -> None:
        shard, leaf = self._ahead.pop(0), self._leaf
        self._tree.add((shard, shard + 1), [torch.zeros_like(like) if leaf is None else leaf])
        self._leaf = None


# --- sections ------------------------------------------------------------------------------------
# Sums of packed buckets of which each rank gets only its own section.
#
# `MeanSections` makes a reduce-scatter at each launch of a bucket. `TreeSections` adds along the
# fixed tree over all shards, so that every element has the bits of `ddp:reduce=tree`.


IN_FLIGHT = 2  # buckets that are sent while backward fills the next one


class Sections(ABC):
    """This rank's sections of all buckets. Every rank makes the same calls in one order."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self.shares = Shares.even(shards, comm.size)

    def deal(self, shares: Shares) -> None:
        """Set the shards of each rank, between two steps."""
        self.shares = shares

    @abstractmethod
    def prepare(self, buckets: Sequence[PackedBucket]) -> None:
        """Set the buckets, when they change."""

    @abstractmethod
    def launch(self, bucket: int, flat: Tensor, leaf: Span, *, last: bool) -> None:
        """Add this rank's gradients of a bucket; the memory of `flat` may be reused here.

        After the `last` leaf there are no more of it in this step.
        """

    @abstractmethod
    def finish(self) -> list[Tensor]:
        """Wait; returns the sum of this rank's section of each bucket, and drops it."""


class MeanSections(Sections):
    """Reduce-scatter, in the order of the collective. Launches of one bucket are added."""

    def prepare(self, buckets: Sequence[PackedBucket]) -> None:
        self._buckets = list(buckets)
        self._sums: dict[int, Tensor] = {}
        self._under_way: deque[tuple[int, Pending, Tensor, Tensor]] = deque()

    def launch(self, bucket: int, flat: Tensor, leaf: Span, *, last: bool) -> None:
        if self.comm.size == 1:
            self._accumulate(bucket, flat)
            return
        while len(self._under_way) >= IN_FLIGHT:
            self._wait()
        part = flat.new_empty(self._buckets[bucket].section)
        self._under_way.append((bucket, self.comm.reduce_scatter(part, flat), part, flat))

    def finish(self) -> list[Tensor]:
        while self._under_way:
            self._wait()
        sums, self._sums = self._sums, {}
        return [self._sum_of(sums, number) for number in range(len(self._buckets))]

    def _sum_of(self, sums: dict[int, Tensor], number: int) -> Tensor:
        """The sum, or zeros if no rank had a pass."""
        bucket = self._buckets[number]
        if number in sums:
            return sums[number]
        return torch.zeros(bucket.section, dtype=bucket.dtype, device=bucket.device)

    def _wait(self) -> None:
        bucket, pending, part, _ = self._under_way.popleft()
        pending.wait()
        self._accumulate(bucket, part)

    def _accumulate(self, bucket: int, part: Tensor) -> None:
        if bucket in self._sums:
            self._sums[bucket].add_(part)
        else:
            self._sums[bucket] = part


class TreeSections(Sections):
    """The fixed tree without the final all-gather. Holds full buckets meanwhile."""

    def prepare(self, buckets: Sequence[PackedBucket]) -> None:
        self._sizes = [bucket.section for bucket in buckets]
        self._trees = [TreeSum(self.shards) for _ in buckets]
        self._received: dict[int, tuple[Tensor, Pending]] = {}
        self._chunks = TreeChunks(self.comm, self.shards)
        self._chunks.deal(self.shares)

    def deal(self, shares: Shares) -> None:
        super().deal(shares)
        self._chunks.deal(shares)

    def launch(self, bucket: int, flat: Tensor, leaf: Span, *, last: bool) -> None:
        tree = self._trees[bucket]
        tree.add(leaf, [flat], borrowed=False)
        if last:
            roots = [tensors[0] for _, tensors in tree.roots]
            alone = self.comm.size == 1
            self._received[bucket] = (
                (roots[0], Pending()) if alone else self._chunks.send_roots(roots)
            )
            self._trees[bucket] = TreeSum(self.shards)

    def finish(self) -> list[Tensor]:
        sums = []
        for bucket, size in enumerate(self._sizes):
            received, pending = self._received.pop(bucket)
            pending.wait()
            sums.append(received if self.comm.size == 1 else self._chunks.total(received, size))
        return sums
