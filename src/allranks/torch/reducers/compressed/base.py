"""What reducers with error feedback share: what was not sent, by parameter, and a plain beginning.

How one bucket is summed is a generator, which yields each message that it has begun and goes on
once that has come. So several buckets are under way at once, in one order on all ranks.

Residuals are of a rank alone. They are kept by the name of a parameter: another order or another
size of buckets finds them again, and a resumed training, on as many ranks, goes on to the bit.
The tally is never rounded. Gradients come divided by the global batch, so a sum is their mean;
clipping, the guard and the optimizer see that sum, the same bits on every rank. What a rank had
sent in a step that is skipped is lost with that step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.reducers.base import Bucket, Reducer


class Exchange(ABC):
    """One bucket, and what this rank keeps of it from step to step."""

    @abstractmethod
    def messages(self) -> Iterator[Pending]:
        """Sum the bucket over all ranks: each message that is begun, to be waited for."""

    @abstractmethod
    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Views of what is kept, by the name of a parameter and of what it is."""


class Compressed(Reducer):
    """Sums plainly in the first `after` steps; then as the exchange of each bucket does."""

    def __init__(self, comm: Comm, shards: int, after: int = 0) -> None:
        super().__init__(comm, shards)
        self.after, self.steps = after, 0
        self._exchanges: list[Exchange] = []
        self._under_way: list[tuple[Iterator[Pending], Pending]] = []

    @abstractmethod
    def exchange_of(self, bucket: Bucket) -> Exchange:
        """How a bucket with the gradients of parameters is summed."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        self._exchanges = [self.exchange_of(bucket) for bucket in buckets if bucket.views]

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        compresses = self._exchanges and self.steps >= self.after
        found = self._exchanges[bucket].messages() if compresses else self._plain(bucket)
        first = next(found, None)
        if first is not None:
            self._under_way.append((found, first))

    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        while under_way:
            still = []
            for messages, pending in under_way:
                pending.wait()
                following = next(messages, None)
                if following is not None:
                    still.append((messages, following))
            under_way = still
        self.steps += bool(self._exchanges)

    def state(self) -> dict[str, Any]:
        kept = {n: parts for exchange in self._exchanges for n, parts in exchange.kept().items()}
        return {"steps": self.steps, "kept": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.steps = int(state["steps"])
        for exchange in self._exchanges:
            for name, parts in exchange.kept().items():
                for what, tensor in state["kept"].get(name, {}).items():
                    if what in parts and parts[what].shape == tensor.shape:
                        parts[what].copy_(tensor)

    def _plain(self, bucket: int) -> Iterator[Pending]:
        yield self.comm.all_reduce(self.buckets[bucket].flat)


def real_view(view: Tensor) -> Tensor:
    """A gradient in real numbers: complex ones are pairs."""
    return torch.view_as_real(view) if view.is_complex() else view


def views_into(flat: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """The parts of `flat` that lie as the gradients of a bucket lie in it, by name."""
    found = {}
    for name, view in bucket.views.items():
        real = real_view(view)
        offset = real.storage_offset() - bucket.flat.storage_offset()
        found[name] = flat.as_strided(real.shape, real.stride(), flat.storage_offset() + offset)
    return found


def shapes_of(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """Those of its gradients; complex ones are vectors of real numbers."""
    views = bucket.views.values()
    return tuple((2 * v.numel(),) if v.is_complex() else tuple(v.shape) for v in views)
