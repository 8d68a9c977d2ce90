"""Data parallelism with buckets: the sum of gradients overlaps with backward.

Gradients are views of a few flat buckets, in the order in which backward finishes them. As soon as
the last backward pass of a step has filled a bucket, its sum over all ranks begins. The tally is
sent with the last bucket. Li et al. 2020, PyTorch Distributed, arXiv 2006.15704. The reducer sums
buckets: `reduce=tree` gives equal bits on any ranks, `bf16` or `fp16` send half the bytes, and
others, as `ring`, are algorithms of point-to-point messages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from allranks.catalog import REDUCERS, load
from allranks.strategies.card import Picked, Workload
from allranks.strategies.cards.data_parallel import is_late
from allranks.strategies.compressed import SIGNED
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.compressed.gathered import shapes_of
from allranks.torch.parallel.data.late import Late, LateGradients, changed_while_late
from allranks.torch.parallel.data.reducer import Bucket, Mean, Reducer
from allranks.torch.parallel.data.tree import Tree
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy, StrategyContext


class DDP(Strategy):
    """Sum buckets of gradients over all ranks, overlapped with backward."""

    name = "ddp"
    computes_alone = True

    @property
    def reduced_by(self) -> Picked:
        """The reducer, with its options."""
        picked: Picked = self.context.options.get("reduce", Picked("mean"))
        return picked

    @property
    def shard_alone(self) -> bool:
        return self.reduced_by.name == "tree"

    def _build_reducer(self) -> Reducer:
        kind = load(REDUCERS[self.reduced_by.name])
        reducer: Reducer = kind(self.comm, self.task.shards, **self.reduced_by.options)
        return reducer

    def prepare(self) -> None:
        self.reducer = self._build_reducer()
        self.can_run_ahead = type(self.reducer).state is Reducer.state  # without residuals
        self._not_sent: dict[str, Any] | None = None

    def _build_buckets(self, tally_size: int, reducer: Reducer, *, moves: bool) -> Buckets:
        return Buckets(
            self.step.names,
            self.step.parameters,
            tally_size=tally_size,
            bucket_bytes=int(self.context.options["bucket_mb"] * 2**20),
            reducer=reducer,
            moves=moves,
        )

    def lay_out(self) -> None:
        if self._not_sent is None and self.reducer.buckets:
            self._not_sent = self.reducer.state()
        self.buckets = self._build_buckets(self.step.layout.size, self.reducer, moves=True)
        self.reducer.load_state(self._not_sent or {})
        self._not_sent = None
        self.tally = self.step.layout.tally(self.buckets.tally)
        self.step.on_gradient = self.buckets.gradient_finished

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        self._not_sent = self.reducer.state()
        return self.reducer.sum_apart(leaves)  # the caller lays out the buckets again

    def own_state(self) -> dict[str, Any]:
        state = self.reducer.state()
        return {"reducer": {"name": self.reduced_by.name, "state": state}} if state else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        saved = state.get("reducer", {})
        if saved.get("name") == self.reduced_by.name:  # not residuals of another reducer
            self.reducer.load_state(saved["state"])

    def messages(self) -> tuple[int, ...]:
        return tuple(flat.nbytes for flat in self.buckets.flats)

    def promised_bytes(self) -> int:
        gradients = sum(gradients.numel() for gradients in self.buckets.gradients)
        work = Workload(
            self.messages(),
            self.comm.size,
            self.task.shards,
            gradients=gradients,
            tally=self.buckets.tally.nbytes,
            shapes=tuple(shapes_of(bucket) for bucket in self.buckets.buckets),
        )
        return self.card.bytes_sent(work, self.context.options)

    def forward_backward(self, batch: Batch) -> Tally:
        self.buckets.begin()
        last = batch.leaves[-1]

        def leaf_done(leaf: Leaf) -> None:
            if leaf is not last:
                self.buckets.add_leaf(leaf.shards)

        self.step.accumulate(
            batch,
            lambda leaf: self.tally,
            leaf_done,
            before_last=lambda: self.buckets.release(last.shards),
        )
        return self.tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.buckets.finish(batch.leaves[-1].shards)
        # by shards the norm must be equal to the bit on any ranks: not the norm of buckets
        flats = [] if self.shard_alone else self.buckets.gradients
        return local, Gradients(self.step.parameters, flats, exact=self.shard_alone)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        if self.reduced_by.name in SIGNED:
            gradients.sign_()
        return super().updating(gradients)


class LateDDP(DDP):
    """`late=1`: a step applies the gradient of the step before, which was summed meanwhile.
    The first `after` steps apply their own.

    A step waits only for the tally, which is summed along the tree if gradients are.
    """

    late: Late

    def prepare(self) -> None:
        kind = Tree if self.shard_alone else Mean
        self.counts: Reducer = kind(self.comm, self.task.shards)

    def lay_out(self) -> None:
        before = self.late.state() if hasattr(self, "late") else {}
        self.late = Late(
            lambda: self._build_buckets(0, self._build_reducer(), moves=False),
            self.step.names,
            self.step.parameters,
            self.context.options["late"].options["after"],
            exact=self.shard_alone,
        )
        self.late.load_state(before)
        layout = self.step.layout
        flat = self.counts.room(layout.size, layout.like)
        self.counts.prepare([Bucket(flat, flat[:0])])
        self.tally = layout.tally(flat[: layout.size])

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        raise changed_while_late()

    def messages(self) -> tuple[int, ...]:
        flats = (flat.nbytes for flat in self.late.filling.flats)
        return (*flats, self.counts.buckets[0].flat.nbytes)

    def promised_bytes(self) -> int:
        *_, tally = messages = self.messages()
        numbers = sum(part.numel() for part in self.late.filling.gradients)
        work = Workload(messages, self.comm.size, self.task.shards, gradients=numbers, tally=tally)
        return self.card.bytes_sent(work, self.context.options)

    def forward_backward(self, batch: Batch) -> Tally:
        self.late.filling.begin()
        self.counts.buckets[0].flat.zero_()
        last = batch.leaves[-1]

        def leaf_done(leaf: Leaf) -> None:
            if leaf is not last:
                self.late.filling.add_leaf(leaf.shards)
            self.counts.launch(0, (leaf.shards.start, leaf.shards.stop), last=leaf is last)

        self.step.accumulate(batch, lambda leaf: self.tally, leaf_done)
        return self.tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.counts.finish()
        shards = batch.leaves[-1].shards
        if not self.step.is_taken(batch, local.totals(batch.index).samples):
            self.late.drop(shards)
        return local, LateGradients(self.late, batch.index, shards)

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """There is no state of this rank alone."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "late": self.late.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.late.load_state(state.get("late", {}))

    def leave(self, *, failed: bool = False) -> None:
        if not failed and hasattr(self, "late"):
            self.late.wait()
        super().leave(failed=failed)


def ddp(context: StrategyContext) -> DDP:
    """The strategy `ddp` with the options in `context`."""
    return LateDDP(context) if is_late(context.options) else DDP(context)
