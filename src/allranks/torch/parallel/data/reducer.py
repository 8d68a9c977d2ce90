"""The base of reducers: each sums buckets over all ranks, perhaps in the background.

A step launches each bucket leaf by leaf. With the last leaf its exchange may begin. At the end the
bucket holds the sum over all leaves of all ranks, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.strategies.shards import Shares
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.model.reals import reals


@dataclass(frozen=True)
class Bucket:
    """A flat tensor that is summed in one message; it begins with the gradients of parameters.

    `views` are these gradients in the shape of their parameters, by name. In the last bucket the
    tally follows, whose numbers must never be rounded. A bucket may end with padding.
    """

    flat: Tensor
    gradients: Tensor
    views: Mapping[str, Tensor] = field(default_factory=dict)


class Reducer:
    """Sums buckets over the ranks of `comm`. Buckets are identified by their index.

    A subclass defines `exchange`. Buckets are in flight at once, in one order on all ranks.
    """

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self.buckets: Sequence[Bucket] = ()
        self._under_way: list[tuple[Iterator[Pending], Pending]] = []

    @property
    def multiple(self) -> int:
        """The number of elements of a bucket must be a multiple of this."""
        return 1

    def room(self, count: int, like: Tensor) -> Tensor:
        """Zeros for the `flat` of a bucket of `count` numbers; every rank calls this."""
        return like.new_zeros(-(-count // self.multiple) * self.multiple, requires_grad=False)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Set the buckets; called when they change, and before residuals are loaded."""
        self.buckets = buckets

    def deal(self, shares: Shares) -> None:
        """Set the shards of each rank, between two steps; every rank calls this.

        Only an order of sums that follows the shards depends on it.
        """

    def exchange(self, bucket: int) -> Iterator[Pending]:
        """Sum a bucket over all ranks, here by one all-reduce.

        Yields each message that it has begun, and continues when that has arrived.
        """
        flat = self.buckets[bucket].flat
        yield self.comm.all_reduce(flat)

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        """Add a leaf of this rank; all ranks use the same order of buckets.

        With the `last` leaf the exchange begins; after any other the bucket is zero again.
        """
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        self.advance(self.exchange(bucket))

    def advance(self, messages: Iterator[Pending]) -> None:
        """Begin the next message of an exchange, if it has another one."""
        if (pending := next(messages, None)) is not None:
            self._under_way.append((messages, pending))

    def finish(self) -> None:
        """Wait until every bucket holds its sum over all ranks."""
        while self._under_way:
            under_way, self._under_way = self._under_way, []
            for messages, pending in under_way:
                pending.wait()
                self.advance(messages)

    def sum_apart(self, leaves: Sequence[tuple[Span, Tensor]]) -> Tensor:
        """Sum flat tensors, one for each leaf of this rank, in the order of this reducer.

        Every rank calls this between two steps, and calls `prepare` again afterwards.
        """
        size = leaves[0][1].numel()
        flat = self.room(size, leaves[0][1])
        self.prepare([Bucket(flat, flat)])
        for span, tensor in leaves:
            flat[:size].copy_(tensor)
            self.launch(0, span, last=span is leaves[-1][0])
        self.finish()
        return flat[:size]

    def state(self) -> dict[str, Any]:
        """The state of this rank that the next steps depend on: residuals."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, for those parameters that are still there.

        `{}` loads nothing.
        """


# --- mean ----------------------------------------------------------------------------------------
# The plain sum of an all-reduce. The engine has divided before, so it is the mean.
#
# The collective chooses the order of additions, which depends on the number of ranks: equal to one
# process up to rounding.


class Mean(Reducer):
    """One all-reduce per bucket. Sends 2(N-1)/N of its bytes."""

    def room(self, count: int, like: Tensor) -> Tensor:
        return self.comm.zeros(count, like)


# --- exact norm ----------------------------------------------------------------------------------
# The norm of a gradient, the same to the last bit however it is cut over ranks.
#
# A sum of floating-point numbers depends on their order, and the order depends on how tensors are
# cut. Here each square is split at fixed powers of two into three numbers. Each is a multiple of a
# unit that is coarse enough to add all of them without rounding, so the order does not matter.
# Demmel and Nguyen 2015, Parallel Reproducible Summation, IEEE Transactions on Computers 64(7).


SPLITS = 3
MANTISSA = 52  # bits of a float64; the bits of the count of elements stay free
BLOCK = 1 << 16  # elements that are split at once, while they are in the cache

Everywhere = Callable[[Tensor], Tensor]
"""Gathers the row of each rank, (ranks, row); every rank calls it."""


def exact_norm(tensors: Sequence[Tensor], everywhere: Everywhere = lambda row: row[None]) -> float:
    """The 2-norm of all `tensors` of all ranks, each of which holds a different part.

    It is not finite if and only if an element is not. With `everywhere` it communicates twice, five
    numbers from each rank in all.
    """
    flats = [reals(tensor.detach()).reshape(-1) for tensor in tensors if tensor.numel()]
    device = tensors[0].device if tensors else torch.device("cpu")
    count = sum(flat.numel() for flat in flats)
    local = torch.tensor([0.0, count], dtype=torch.float64, device=device)
    if flats:
        local[0] = torch.stack([flat.abs().amax().double() for flat in flats]).amax()
    rows = everywhere(local)
    largest, count = float(rows[:, 0].amax()), int(rows[:, 1].sum())
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    sums = torch.zeros(SPLITS, dtype=torch.float64, device=device)
    for flat in flats:
        for block in flat.split(BLOCK):
            sums += _split_sums(block.double() * 2.0**-exponent, count.bit_length())
    total = everywhere(sums).sum(dim=0)
    return math.sqrt(math.fsum(total.tolist())) * 2.0**exponent


def _split_sums(values: Tensor, bits: int) -> Tensor:
    """The sums of the squares of `values`, all below 1, split at units, without rounding.

    `bits` is the number of bits of the count of all elements.
    """
    remainder = values.square_()
    sums = []
    power = bits - MANTISSA
    for _ in range(SPLITS):
        shift = 1.5 * 2.0 ** (MANTISSA + power)  # what is added to it is rounded to 2 ** power
        high = remainder.add(shift).sub_(shift)
        remainder = remainder.sub_(high)
        sums.append(high.sum())
        power += bits - MANTISSA - 1
    return torch.stack(sums)
