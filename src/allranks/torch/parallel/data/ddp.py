"""Data parallelism with buckets: the sum of gradients overlaps with backward.

Gradients are views of a few flat buckets, the last parameters first. In the last backward pass of a
step a bucket is launched as soon as it and all buckets before it are full. The last one waits for
the end of backward, because the tally is at its end. Li et al. 2020, PyTorch Distributed, arXiv
2006.15704. The reducer sums buckets: `reduce=tree` gives equal bits on any ranks, `bf16` or `fp16`
send half the bytes, and others, as `ring`, are algorithms of point-to-point messages. `late=1`
applies gradients one step late: `late_ddp`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from allranks.catalog import REDUCERS, load
from allranks.strategies.card import Picked, Workload
from allranks.strategies.cards.data_parallel import is_late
from allranks.strategies.compressed import SIGNED
from allranks.strategies.reduction_tree import Span
from allranks.strategies.shards import Shares
from allranks.torch.data.batch import Batch
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.compressed.gathered import shapes_of
from allranks.torch.parallel.data.reducer import Reducer
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy, StrategyContext


class DDP(Strategy):
    """Sum buckets of gradients over all ranks, overlapped with backward."""

    computes_alone = has_whole_passes = True

    @cached_property
    def reduced_by(self) -> Picked:
        """The reducer, with its options."""
        picked: Picked = self.context.options.get("reduce", Picked("mean"))
        return picked

    def _build_reducer(self) -> Reducer:
        kind = load(REDUCERS[self.reduced_by.name])
        reducer: Reducer = kind(self.comm, self.task.shards, **self.reduced_by.options)
        return reducer

    def prepare(self) -> None:
        self.reducer = self._build_reducer()
        self.has_own_state = type(self.reducer).state is not Reducer.state  # residuals
        self.can_run_ahead = not self.has_own_state
        self._not_sent: dict[str, Any] | None = None  # residuals, while buckets are laid out anew

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

    def deal(self, shares: Shares) -> None:
        super().deal(shares)
        self.reducer.deal(shares)

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

    def workload(self) -> Workload:
        buckets = self.buckets
        return self.work(
            *(flat.nbytes for flat in buckets.flats),
            gradients=sum(gradients.numel() for gradients in buckets.gradients),
            tally=buckets.tally.nbytes,
            shapes=tuple(shapes_of(bucket) for bucket in buckets.buckets),
        )

    def forward_backward(self, batch: Batch) -> Tally:
        """Run all micro-batches; buckets are launched during the last backward pass.

        There is one leaf, with all shards of this rank, except with `reduce=tree`, where each shard
        is a leaf. A rank without samples releases nothing: `reduce` launches its zeros.
        """
        buckets, last = self.buckets, batch.leaves[-1]
        buckets.begin()
        for leaf in self.step.leaves(batch, self.tally, partial(buckets.release, last.shards)):
            if leaf is not last:
                buckets.add_leaf(leaf.shards)
        return self.tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.buckets.finish(batch.leaves[-1].shards)
        # along the tree the norm must not depend on the buckets, so it is taken by parameter
        is_exact = self.shard_alone
        flats = [] if is_exact else self.buckets.gradients
        return local, Gradients(self.step.parameters, flats, exact=is_exact, are_dense=True)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        if self.reduced_by.name in SIGNED:
            gradients.sign_()
        return super().updating(gradients)


LATE = "allranks.torch.parallel.data.late_ddp:LateDDP"


def ddp(context: StrategyContext) -> DDP:
    """The strategy `ddp` with the options in `context`."""
    kind: type[DDP] = load(LATE) if is_late(context.options) else DDP
    return kind(context)
