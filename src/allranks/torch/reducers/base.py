"""What every reducer is: it sums one bucket at a time over all ranks, and may do so in the back.

A step gives each bucket to the reducer leaf by leaf; with the last leaf its exchange may begin; at
the end the bucket holds the sum over all leaves of all ranks, the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm


@dataclass(frozen=True)
class Bucket:
    """What is summed in one message: a flat tensor, which begins with the gradients of parameters.

    `views` are these gradients in the shape of their parameters, by name. What follows them in
    `flat` is the tally: numbers that must never be rounded.
    """

    flat: Tensor
    gradients: Tensor
    views: Mapping[str, Tensor] = field(default_factory=dict)


class Reducer(ABC):
    """Sums buckets over the ranks of `comm`. Buckets are told apart by their index."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self.buckets: Sequence[Bucket] = ()

    @property
    def multiple(self) -> int:
        """The number of elements of a bucket must be a multiple of this."""
        return 1

    def room(self, count: int, like: Tensor) -> Tensor:
        """Zeros for the `flat` of a bucket that has to hold so many; every rank calls this."""
        return like.new_zeros(-(-count // self.multiple) * self.multiple, requires_grad=False)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Learn the buckets, whenever they change; what was not sent yet is loaded after it."""
        self.buckets = buckets

    @abstractmethod
    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        """Take in a leaf of this rank, in the same order of buckets on all ranks.

        With the `last` the exchange begins; after any other one the bucket is zero again.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until every bucket holds its sum over all ranks."""

    def sum_apart(self, leaves: Sequence[tuple[Span, Tensor]]) -> Tensor:
        """The sum of flat tensors, one for each leaf of this rank, in the order of every sum.

        Every rank calls this, between the sums of two steps. The buckets are to be prepared again.
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
        """What the next steps depend on, of this rank alone: residuals that were not sent yet."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned, perhaps of other parameters: of those that are there.

        Of `{}` nothing.
        """
