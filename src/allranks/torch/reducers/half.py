"""Sums with 16 bits of each gradient on the wire: half the bytes of `mean`, and less rounding.

    1. every rank rounds its gradients to 16 bit, and gives chunk r of them to rank r
    2. rank r adds what it was given in float32, in the order of the ranks, rounds the sum to
       16 bit, and gives it to all

So a gradient is rounded twice, on any number of ranks, where an all-reduce of 16-bit numbers would
round after every addition; all ranks end with the same bits, and a plain loop over the gradients
of the ranks makes the same ones. float64 is rounded and added likewise. One rank alone sends
nothing and rounds nothing.

The tally (loss, weights, counts, moments of BatchNorm) is not rounded: a chunk of it, in its own
type, rides at the head of every message, and is added in the order of the ranks too.

bf16 has the range of float32 and 8 bits of precision. fp16 has 11, but what is above 65,504
becomes infinite, on all ranks alike, and is caught as any bad step is: by the loss scale under
`--precision fp16`, else by the guard; and what is below 6e-8 becomes 0. Gradients come here divided
by the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.reducers.base import Bucket, Reducer

WHOLE = 4  # 16-bit numbers: a row is whole 8 bytes, so that a tally of any type is aligned in it


class Half(Reducer):
    """An all-to-all and an all-gather per bucket.
    Sends 2(N-1)/N of 2 bytes per gradient + tally."""

    kind: ClassVar[torch.dtype]

    def __init__(self, comm: Comm, shards: int) -> None:
        super().__init__(comm, shards)
        self._exchanges: list[_Exchange] = []

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        ranks = self.comm.size
        self._exchanges.clear()
        for bucket in buckets:
            own = bucket.gradients
            tally = bucket.flat[own.numel() :]
            given, received, total = (
                _rows(count, ranks, own, tally, self.kind) for count in (ranks, ranks, 1)
            )
            matches = [*_matching(own, given.gradients), *_matching(tally, given.tally)]
            self._exchanges.append(_Exchange(given, received, total, matches))

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        if self.comm.size == 1:
            return
        exchange = self._exchanges[bucket]
        exchange.round()
        given, received = exchange.given.bytes, exchange.received.bytes
        sizes = [given.shape[1]] * self.comm.size
        exchange.pending = self.comm.all_to_all(received.view(-1), given.view(-1), sizes, sizes)

    def finish(self) -> None:
        if self.comm.size == 1:
            return
        for exchange in self._exchanges:
            exchange.pending.wait()
            exchange.add()
            sums, own = exchange.given.bytes, exchange.total.bytes
            exchange.pending = self.comm.all_gather(sums.view(-1), own.view(-1))
        for exchange in self._exchanges:
            exchange.pending.wait()
            exchange.take()


class FP16(Half):
    """11 bits of precision, from 6e-8 to 65,504."""

    kind = torch.float16


class BF16(Half):
    """8 bits of precision, the range of float32."""

    kind = torch.bfloat16


@dataclass(frozen=True)
class _Rows:
    """Messages, a row of bytes each: a part of the tally as it is, then gradients in 16 bit."""

    bytes: Tensor  # (row, bytes)
    tally: Tensor  # (row, part of the tally)
    gradients: Tensor  # (row, part of the gradients)


def _rows(count: int, ranks: int, gradients: Tensor, tally: Tensor, kind: torch.dtype) -> _Rows:
    """`count` rows of zeros, each with room for one part in `ranks` of a bucket."""
    head = -(-tally.numel() // ranks) * tally.element_size()
    part = -(-gradients.numel() // (ranks * WHOLE)) * WHOLE
    rows = gradients.new_zeros((count, head + part * kind.itemsize), dtype=torch.uint8)
    return _Rows(rows, rows[:, :head].view(tally.dtype), rows[:, head:].view(kind))


def _matching(values: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of `values`, (n,), beside the views of `rows` that they fill one after another."""
    if values.numel() == 0:
        return []
    full, rest = divmod(values.numel(), rows.shape[1])
    whole = values[: values.numel() - rest]
    found = [(whole.view(full, -1), rows[:full])] if full else []
    return [*found, (values[whole.numel() :], rows[full, :rest])] if rest else found


@dataclass
class _Exchange:
    """One bucket on its way. `given` becomes the sums of all ranks once it has been sent."""

    given: _Rows
    received: _Rows
    total: _Rows
    matches: list[tuple[Tensor, Tensor]]
    pending: Pending = field(default_factory=Pending)

    def round(self) -> None:
        """Lay the bucket into the rows that are given away."""
        for values, row in self.matches:
            row.copy_(values)

    def add(self) -> None:
        """The sums of this rank's chunk over all ranks, in their order."""
        total = self.received.gradients[0].float()
        for gradients in self.received.gradients[1:]:
            total.add_(gradients)
        self.total.gradients[0].copy_(total)
        tally = self.total.tally[0].copy_(self.received.tally[0])
        for part in self.received.tally[1:]:
            tally.add_(part)

    def take(self) -> None:
        """Lay the sums back into the bucket."""
        for values, row in self.matches:
            values.copy_(row)
