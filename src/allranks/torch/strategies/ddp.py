"""Data parallelism with buckets: gradients leave while backward is still going on.

Gradients live in a few flat buckets, in the order in which backward finishes them. As soon as the
last backward pass of a step has filled a bucket, its sum over all ranks is under way; the tally
rides on the bucket that leaves last. Li et al. 2020, PyTorch Distributed, arXiv 2006.15704. How a
bucket is summed is the reducer's: `reduce=tree` for equal bits, `bf16` or `fp16` for half the
bytes, or an algorithm made of messages, as `ring`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allranks.catalog import REDUCERS, load
from allranks.strategies.card import Picked, Workload
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.reducers.base import Reducer
from allranks.torch.reducers.buckets import Buckets
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy


class DDP(Strategy):
    """Sum buckets of gradients over all ranks, overlapped with backward."""

    name = "ddp"

    @property
    def reduced_by(self) -> Picked:
        """The reducer, with its options."""
        picked: Picked = self.context.options.get("reduce", Picked("mean"))
        return picked

    @property
    def shard_alone(self) -> bool:
        return self.reduced_by.name == "tree"

    def prepare(self) -> None:
        kind = load(REDUCERS[self.reduced_by.name])
        self.reducer: Reducer = kind(self.comm, self.task.shards, **self.reduced_by.options)
        self._not_sent: dict[str, Any] | None = None

    def lay_out(self) -> None:
        if self._not_sent is None and self.reducer.buckets:
            self._not_sent = self.reducer.state()
        self.buckets = Buckets(
            self.step.names,
            self.step.parameters,
            tally_size=self.step.layout.size,
            bucket_bytes=int(self.context.options["bucket_mb"] * 2**20),
            reducer=self.reducer,
        )
        self.reducer.load_state(self._not_sent or {})
        self._not_sent = None
        self.tally = self.step.layout.tally(self.buckets.tally)
        self.step.on_gradient = self.buckets.gradient_finished

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        self._not_sent = self.reducer.state()
        return self.reducer.sum_apart(leaves)  # the buckets are laid out anew after this

    def own_state(self) -> dict[str, Any]:
        state = self.reducer.state()
        return {"reducer": {"name": self.reduced_by.name, "state": state}} if state else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        kept = state.get("reducer", {})
        if kept.get("name") == self.reduced_by.name:  # no residuals of another one
            self.reducer.load_state(kept["state"])

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
        # by shards the norm too is the same, to the bit, on any ranks: not that of buckets
        flats = [] if self.shard_alone else self.buckets.gradients
        return local, Gradients(self.step.parameters, flats, exact=self.shard_alone)
