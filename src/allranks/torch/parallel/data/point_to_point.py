"""All-reduces made of point-to-point messages: ring, halving-doubling, trees and others.

They do with sends and receives what a collective does inside a backend, so that algorithms can be
compared. `strategies.reduction_schedules` defines the messages. A bucket is cut into `pieces`,
which are pipelined: while one is added, the next is in flight. The first turn of each piece runs
during backward, the others in `finish`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from allranks.strategies.reduction_schedules import SCHEDULES, chunks_of, cut
from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.parallel.data.reducer import Reducer


class PointToPoint(Reducer):
    """Sums by the schedule of this `name`. Sends what the card of `ddp` says for it.

    All ranks make the turns of all pieces in the same order, and send their own messages of a turn
    before they wait for others, so there is no deadlock.
    """

    def __init__(
        self, name: str, comm: Comm, shards: int, *, pieces: int = 1, **options: Any
    ) -> None:
        super().__init__(comm, shards)
        self.name, self.pieces, self.options = name, pieces, options

    @property
    def multiple(self) -> int:
        return self.pieces * chunks_of(self.name, self.comm.size)

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        flat = self.buckets[bucket].flat
        for part in cut(range(flat.numel()), self.pieces):
            self.advance(self._turns(flat[part.start : part.stop], len(self._under_way)))

    def _turns(self, flat: Tensor, number: int) -> Iterator[Pending]:
        """Make the turns of piece `number`: post all messages of each, then wait for them."""
        turns = SCHEDULES[self.name](self.comm.size, self.comm.rank, flat.numel(), self.options)
        for tag, turn in enumerate(turns, start=number * len(turns)):
            places = [(peer, flat[part.start : part.stop]) for peer, part in turn.receives]
            sends = [(peer, flat[part.start : part.stop]) for peer, part in turn.sends]
            came = places
            if turn.adds:
                came = [(peer, place.new_empty(place.shape)) for peer, place in places]
            messages = self.comm.exchange(sends, came, tag)
            yield Pending()  # other pieces post theirs
            for message in messages:
                message.wait()
            if turn.adds:
                for (_, place), (_, new) in zip(places, came, strict=True):
                    place.add_(new)


ring = partial(PointToPoint, "ring")
halving_doubling = partial(PointToPoint, "halving-doubling")
binary_tree = partial(PointToPoint, "binary-tree")
star = partial(PointToPoint, "star")
hierarchical = partial(PointToPoint, "hierarchical")
