"""Which shards are computed again, by whom, and from which samples: one look of the witness.

Every rank offers one of its micro-batches. The owner of this look computes its own as a whole and
piece by piece, or, if it is one piece, together with one of another rank; the next rank, the
helper, reads the chosen piece once more and computes it too. Both say what they got in plain
numbers, and the witness compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.shards import Piece
from allranks.torch.data.batch import Batch
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.collate import copied
from allranks.torch.data.loaders import WholeLoader
from allranks.torch.data.sources import StreamSource
from allranks.torch.random.readings import UnclearDraw
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.plain_state import Roots
from allranks.torch.witness.recomputed import (
    Part,
    Recomputing,
    cut_out,
    leaving_no_trace,
    read_again,
)

NO_REREADING = "samples of this data are not read once more, so shards are cut out of what was read"


@dataclass(frozen=True)
class Offer:
    """One micro-batch of a rank: its place among those of the rank, its pieces and samples."""

    micro: int
    pieces: tuple[Piece, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, turn: int) -> Offer | None:
        """The micro-batch whose turn it is; `None` of a rank without a sample."""
        if not batch.micros:
            return None
        chosen = turn % len(batch.micros)
        start = sum(micro.samples for micro in batch.micros[:chosen])
        micro = batch.micros[chosen]
        ids = batch.ids[start : start + micro.samples]
        return cls(chosen, micro.pieces, tuple(int(number) for number in ids))

    def to_text(self) -> str:
        rows = [[p.shard, p.start, p.stop, p.shard_size] for p in self.pieces]
        return json.dumps({"micro": self.micro, "pieces": rows, "ids": self.ids})

    @classmethod
    def from_text(cls, text: str) -> Offer | None:
        if not text:
            return None
        data = json.loads(text)
        pieces = tuple(Piece(*row) for row in data["pieces"])
        return cls(data["micro"], pieces, tuple(data["ids"]))

    def ids_of(self, piece: Piece) -> tuple[int, ...]:
        before = 0
        for own in self.pieces:
            if own == piece:
                break
            before += own.samples
        return self.ids[before : before + piece.samples]


@dataclass(frozen=True)
class SecondLook:
    """What is known on every rank of one look; `turn` decides whose, and which piece."""

    strategy: Strategy
    batch: Batch
    batches: GlobalBatches
    recomputing: Recomputing
    turn: int
    offers: tuple[Offer | None, ...]

    @property
    def owner(self) -> int:
        """The rank that compares its own; there is one, as some rank has a sample."""
        ranks = [rank for rank, offer in enumerate(self.offers) if offer is not None]
        return ranks[self.turn % len(ranks)]

    @property
    def helper(self) -> int:
        return (self.owner + 1) % len(self.offers)

    @property
    def offer(self) -> Offer:
        offer = self.offers[self.owner]
        assert offer is not None
        return offer

    @property
    def chosen(self) -> Piece:
        """The piece that the helper computes, too."""
        return self.offer.pieces[self.turn % len(self.offer.pieces)]

    @property
    def can_read(self) -> bool:
        return not isinstance(self.batches.source, (StreamSource, WholeLoader))

    def run(self, rank: int, roots: Roots) -> dict[str, Any]:
        """What this rank found; leaves no trace, and raises nothing: the training may do well."""
        if rank not in (self.owner, self.helper):
            return {}
        try:
            with leaving_no_trace(self.strategy.step, roots):
                return self._as_owner() if rank == self.owner else self._as_helper()
        except UnclearDraw as error:
            return {"differs": f"{error.asked}: {error.found}; {error.why}"}
        except RequestError as error:  # what cannot be copied, or has no rows
            return {"unseen": f"no shard was computed again: {error.found}; {error.why}"[:400]}
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            return {"unseen": f"a shard computed again ended with {told}"[:400]}

    def _as_owner(self) -> dict[str, Any]:
        whole, parts = self._whole_and_parts()
        chosen = whole.pieces.index(self.chosen)
        differs, sketch = self.recomputing.together_and_alone(whole, parts, chosen)
        unseen = "" if self.can_read else NO_REREADING
        return {"differs": differs, "sketch": sketch, "unseen": unseen}

    def _whole_and_parts(self) -> tuple[Part, list[Part]]:
        """What goes through the model at once, and each of its pieces."""
        offer, micro = self.offer, self.batch.micros[self.offer.micro]
        # a copy: a model may write on its inputs, and the step has not been made yet
        whole = Part(offer.pieces, copied(micro.data))
        goes_alone = self.strategy.shard_alone or self.batches.collate_draws
        if len(offer.pieces) == 1 and self.can_read and not goes_alone:
            whole = self._with_another() or whole
        if self.can_read:
            parts = [self._read(piece) for piece in whole.pieces]
        else:
            apart = Part(whole.pieces, copied(micro.data))
            parts = [cut_out(apart, piece) for piece in whole.pieces]
        return whole, parts

    def _as_helper(self) -> dict[str, Any]:
        if not self.can_read:
            return {}
        part = self._read(self.chosen)
        return {"sketch": self.recomputing.sketch(part, self.recomputing.run(part))}

    def _with_another(self) -> Part | None:
        """The owner's piece together with the first of another rank, or of its own next pass."""
        for other in self._others():
            if other.pieces[0] != self.chosen:
                both = sorted((self.chosen, other.pieces[0]), key=lambda p: (p.shard, p.start))
                ids = [number for piece in both for number in self._ids(piece)]
                return Part(tuple(both), self._data(ids))
        return None

    def _others(self) -> list[Offer]:
        behind = (*self.offers[self.owner + 1 :], *self.offers[: self.owner])
        known = (*behind, Offer.of(self.batch, self.offer.micro + 1))
        return [offer for offer in known if offer is not None]

    def _ids(self, piece: Piece) -> tuple[int, ...]:
        offer = next(o for o in (self.offer, *self._others()) if piece in o.pieces)
        return offer.ids_of(piece)

    def _read(self, piece: Piece) -> Part:
        return Part((piece,), self._data(self._ids(piece)))

    def _data(self, ids: Iterable[int]) -> Any:
        """Samples by their numbers, collated and placed: copies, where collate hands them on."""
        assert not isinstance(self.batches.source, (StreamSource, WholeLoader))
        return copied(read_again(self.batches.source, self.batch.epoch, [*ids], self.strategy.step))
