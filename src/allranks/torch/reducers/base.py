"""What every reducer is: it sums one bucket at a time over all ranks, and may do so in the back.

A bucket is a flat tensor that holds the gradients of some parameters. A step gives it to the
reducer leaf by leaf; with the last leaf its exchange may begin; at the end the bucket holds the
sum over all leaves of all ranks, the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.torch.comm import Comm


class Reducer(ABC):
    """Sums buckets over the ranks of `comm`. Buckets are told apart by their index."""

    def __init__(self, comm: Comm, shards: int) -> None:
        self.comm, self.shards = comm, shards

    @property
    def multiple(self) -> int:
        """The number of elements of a bucket must be a multiple of this."""
        return 1

    def prepare(self, flats: list[Tensor], gradients: list[Tensor]) -> None:
        """Learn the buckets, whenever they change: each whole, and the gradients it begins with.

        What follows them in the last bucket is the tally: numbers that must never be rounded.
        """

    @abstractmethod
    def add(self, bucket: int, flat: Tensor, leaf: Span) -> None:
        """Take in a leaf that is not the last of this rank, and leave `flat` zero."""

    @abstractmethod
    def launch(self, bucket: int, flat: Tensor, leaf: Span) -> None:
        """Take in the last leaf of this rank and begin the exchange; same order on all ranks."""

    @abstractmethod
    def finish(self, flats: list[Tensor]) -> None:
        """Wait until every bucket holds its sum over all ranks."""
