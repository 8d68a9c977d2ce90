"""The plain sum of an all-reduce; with the division that the engine has done before, the mean.

The order of additions is the collective's own and follows the number of ranks: equal to one
process up to rounding.
"""

from __future__ import annotations

from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.reducers.base import Reducer


class Mean(Reducer):
    """One all-reduce per bucket. Sends 2(N-1)/N of its bytes."""

    def __init__(self, comm: Comm, shards: int) -> None:
        super().__init__(comm, shards)
        self._under_way: list[Pending] = []

    def room(self, count: int, like: Tensor) -> Tensor:
        return self.comm.zeros(count, like)

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        flat = self.buckets[bucket].flat
        self._under_way.append(self.comm.all_reduce(flat))

    def finish(self) -> None:
        for pending in self._under_way:
            pending.wait()
        self._under_way.clear()
