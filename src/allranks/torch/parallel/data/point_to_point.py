"""All-reduces made of point-to-point messages: ring, halving-doubling, trees and others.

They do with sends and receives what a collective does inside a backend, so that algorithms can be
compared. `strategies.reduction_schedules` defines the messages. A bucket is cut into `pieces`,
which are pipelined: while one is added, the next is in flight. The first turn of each piece runs
during backward, the others in `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from allranks.strategies.reduction_schedules import SCHEDULES, Part, Turn, chunks_of, cut
from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.parallel.data.reducer import Reducer


class PointToPoint(Reducer):
    """Sums by the schedule of its name. Sends what the card of `ddp` says for it.

    All ranks make the turns of all pieces in the same order, and send their own messages of a turn
    before they wait for others, so there is no deadlock.
    """

    name: ClassVar[str]

    def __init__(self, comm: Comm, shards: int, *, pieces: int = 1, **options: Any) -> None:
        super().__init__(comm, shards)
        self.pieces, self.options = pieces, options
        self._under_way: list[_Piece] = []

    @property
    def multiple(self) -> int:
        return self.pieces * chunks_of(self.name, self.comm.size)

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        flat = self.buckets[bucket].flat
        for part in cut(range(flat.numel()), self.pieces):
            self._begin(flat[part.start : part.stop])

    def finish(self) -> None:
        turns = max((len(piece.turns) for piece in self._under_way), default=0)
        for turn in range(turns):
            for piece in self._under_way:
                piece.end()
                piece.begin(turn + 1)
        self._under_way.clear()

    def _begin(self, flat: Tensor) -> None:
        turns = SCHEDULES[self.name](self.comm.size, self.comm.rank, flat.numel(), self.options)
        first_tag = len(self._under_way) * len(turns)
        piece = _Piece(self.comm, flat, turns, first_tag)
        self._under_way.append(piece)
        piece.begin(0)


class Ring(PointToPoint):
    """Chunks go round a ring of all ranks twice."""

    name = "ring"


class HalvingDoubling(PointToPoint):
    """Halves, quarters, … go to partners at half the distance each time, and come back."""

    name = "halving-doubling"


class BinaryTree(PointToPoint):
    """Sums go up a tree of ranks, and down again. Not the tree over shards of `reduce=tree`."""

    name = "binary-tree"


class Star(PointToPoint):
    """All goes through rank 0."""

    name = "star"


class Hierarchical(PointToPoint):
    """Rings within groups of ranks that are near each other, and rings across them."""

    name = "hierarchical"


@dataclass
class _Piece:
    """A part of a bucket in flight; `came` are (target, received) pairs of the current turn."""

    comm: Comm
    flat: Tensor
    turns: list[Turn]
    first_tag: int
    came: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)

    def begin(self, number: int) -> None:
        """Post all messages of a turn."""
        if number >= len(self.turns):
            return
        turn = self.turns[number]
        places = [(peer, self._part(part)) for peer, part in turn.receives]
        if turn.adds:
            self.came = [(place, place.new_empty(place.shape)) for _, place in places]
            places = [(peer, new) for (peer, _), (_, new) in zip(places, self.came, strict=True)]
        sends = [(peer, self._part(part)) for peer, part in turn.sends]
        self.pending = self.comm.exchange(sends, places, self.first_tag + number)

    def end(self) -> None:
        """Wait for the messages, and add what came, in the order of the turn."""
        for pending in self.pending:
            pending.wait()
        for place, new in self.came:
            place.add_(new)
        self.came = []

    def _part(self, part: Part) -> Tensor:
        return self.flat[part.start : part.stop]
