"""What is summed over all ranks beside the parts of weights: one message of a few numbers.

[ tally | gradients of weights of no dimension, which are not cut | the order of calls ]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from allranks.strategies.reduction_tree import Span
from allranks.torch.reducers.base import Bucket, Reducer
from allranks.torch.sharding.call_order import NUMBERS, CallOrder
from allranks.torch.step.tally import TallyLayout


class Beside:
    """The message of one rank. `copies` are the ids of weights that another rank counts."""

    def __init__(
        self,
        reducer: Reducer,
        layout: TallyLayout,
        parameters: Sequence[nn.Parameter],
        copies: Collection[int],
    ) -> None:
        self.reducer, self.copies = reducer, copies
        self.uncut = [p for p in parameters if not p.ndim]
        size = layout.size + len(self.uncut) + NUMBERS
        self.flat = reducer.room(size, layout.like)
        self.tally = layout.tally(self.flat[: layout.size])
        self._gradients = self.flat[layout.size : size - NUMBERS]
        self._calls = self.flat[size - NUMBERS : size]
        self._orders: dict[int, Tensor] = {}
        reducer.prepare([Bucket(self.flat, self.flat)])

    def begin(self) -> None:
        """A step begins."""
        self.flat.zero_()

    def take_gradients(self) -> None:
        """Take those of a leaf; they are empty then."""
        for parameter, number in zip(self.uncut, self._gradients, strict=True):
            if parameter.grad is not None and id(parameter) not in self.copies:
                number.copy_(parameter.grad)
            parameter.grad = None

    def leaf_done(self, leaf: Span) -> None:
        """Take in a leaf that is not the last."""
        self.reducer.launch(0, leaf, last=False)

    def sum_up(self, leaf: Span, order: CallOrder, ranks: int, *, unread: bool) -> None:
        """The sums over so many ranks, with the last leaf; every rank calls this.

        Raises `RequestError` unless units were called in one `order` on all of them; where sums
        are to stay `unread`, the tally is not right then.
        """
        if order.digest not in self._orders:
            self._orders = {order.digest: self._calls.new_tensor(order.numbers())}
        self._calls.copy_(self._orders[order.digest])
        self.reducer.launch(0, leaf, last=True)
        self.reducer.finish()
        if unread:
            self.tally.is_right = order.sums_agree(self._calls, ranks)
        else:
            with self.reducer.comm.reading():
                calls = self._calls.tolist()
            order.check_sums(calls, ranks)
        for parameter, number in zip(self.uncut, self._gradients, strict=True):
            parameter.grad = number.to(parameter.dtype, copy=True)
