"""The second look where a pass through the model communicates: all ranks make it together.

No rank holds the weights for a pass by itself. So each takes one of its own micro-batches, and all
go through the model with it as a whole, then shard by shard, and then with one shard of the rank
before, as often as the rank with the most, by the passes of the strategy (`Strategy.recompute`).
Losses and weights are compared rank by rank, gradients over all ranks: passes may have summed them.
They are computed as the job says, with autocast if it has one, by no more memory than a step takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from allranks.errors import AllranksError, RequestError
from allranks.torch.checkpoint.tree import local
from allranks.torch.data.batch import Batch, Leaf, MicroBatch
from allranks.torch.data.batches import NO_IDS
from allranks.torch.data.collate import copied, tensors_in
from allranks.torch.step.gradients import length_of_each
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.observed import Roots, digest_of
from allranks.torch.witness.recompute import (
    NO_REREADING,
    Coarsest,
    Passed,
    RecomputedPart,
    SecondLook,
    Sketch,
    in_words,
    leaving_no_trace,
)

ALONE = "each shard goes through the model alone, and none was computed again by another rank"
OVER_BATCH = "no shard was computed again: passes communicate, and the loss is over the batch"


def why_none(strategy: Strategy) -> str:
    """Why all ranks do not look together under a strategy; "" if they do."""
    if strategy.shard_alone:
        return ALONE
    return OVER_BATCH if strategy.task.loss_over == "batch" else ""


@dataclass
class MicroBatchLosses:
    """The probe of these passes: the sum of the losses of each micro-batch, and its size."""

    sums: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    weight: float = 0.0

    def begin(self, batch: Batch) -> None:
        """Nothing has gone through yet."""

    def losses(self, losses: Tensor) -> None:
        self.sums.append(float(losses.sum()))
        self.sizes.append(float(losses.abs().sum()))

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """There is no update."""


@dataclass(frozen=True)
class PassParts:
    """What one rank goes through the model with, in the order of the passes."""

    whole: list[RecomputedPart]
    alone: list[RecomputedPart]
    of_another: list[RecomputedPart]
    chosen: int = 0


@dataclass(frozen=True)
class JointLook(SecondLook):
    """What one rank does of it; the `offers` are those of the ranks that read the batch."""

    @property
    def owner(self) -> int:
        """Every rank compares its own."""
        return self.strategy.data.rank

    def run_together(self, roots: Roots, *, exact: bool) -> tuple[str, str]:
        """What differs, and what was not looked at, the same on all; every rank calls this."""
        step, sent = self.strategy.step, self.strategy.comm.sent_bytes
        for parameter in step.model.parameters():
            parameter.grad = None  # those of the step before, which the next one does not read
        with _counted_as_control(sent), leaving_no_trace(step, roots):
            parts, failed = self._prepared()
            rows = self._told({"failed": failed, "passes": len(parts.alone)})
            if unseen := next(filter(None, (row["failed"] for row in rows)), ""):
                return "", unseen
            most = max(row["passes"] for row in rows)
            try:
                differs = self._compared(parts, most, exact=exact)
            except AllranksError:
                raise
            except Exception as error:
                raise _ended(error) from error
        return differs, "" if self.can_read else NO_REREADING

    # --- what goes through ----------------------------------------------------------------

    def _prepared(self) -> tuple[PassParts, str]:
        """The samples of this rank, or why it has none: no other rank waits for it yet."""
        try:
            return self._parts(), ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            return PassParts([], [], []), f"the samples of a shard were not there again: {told}"[
                :400
            ]

    def _parts(self) -> PassParts:
        offers, own = self.offers, self.strategy.data.rank
        for needed in (self.batch.spare, *self.batch.micros[:1]):
            if needed is not None:
                copied(needed.data)  # raises here, where no rank waits, for what cannot be copied
        of_another: list[RecomputedPart] = []
        if self.can_read and (before := offers[own - 1]) is not None and len(offers) > 1:
            piece = before.pieces[self.turn % len(before.pieces)]
            of_another = [RecomputedPart((piece,), self._data(before.ids_of(piece)))]
        if offers[own] is None:
            return PassParts([], [], of_another)
        whole, alone = self._whole_and_parts()
        return PassParts([whole], alone, of_another, whole.pieces.index(self.chosen))

    def _with_another(self) -> RecomputedPart | None:
        """On the host alone: a pass of two micro-batches may not fit the memory of a device."""
        on_host = self.strategy.comm.device.type == "cpu"
        return super()._with_another() if on_host else None

    def _batch(self, parts: list[RecomputedPart], passes: int) -> Batch:
        micros = tuple(MicroBatch(part.pieces, part.samples, part.data) for part in parts)
        leaf, spare = Leaf(self.batch.leaves[-1].shards, micros), self.batch.spare
        if spare is None and not parts and self.batch.micros:
            spare = self.batch.micros[0]
        if spare is not None:
            spare = replace(spare, data=copied(spare.data))
        passes = passes if self.batch.passes else 0
        return replace(self.batch, leaves=(leaf,), ids=NO_IDS, passes=passes, spare=spare)

    def _passes(
        self, parts: list[RecomputedPart], passes: int
    ) -> tuple[MicroBatchLosses, list[Tensor | None]]:
        """What the passes of these parts give on this rank; all ranks make so many."""
        step, found = self.strategy.step, MicroBatchLosses()
        with step.recomputing(found):
            found.weight = self.strategy.recompute(self._batch(parts, passes)).weight
        gradients = [p.grad for p in step.parameters]
        return found, [None if g is None else _own(g) for g in gradients]

    # --- what is compared -----------------------------------------------------------------

    def _compared(self, parts: PassParts, most: int, *, exact: bool) -> str:
        together, rest = self._passes(parts.whole, 1)
        sizes = length_of_each(rest)
        alone, gradients = self._passes(parts.alone, most)
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                before = rest[position]
                rest[position] = -gradient if before is None else before.sub_(gradient)
        off = length_of_each(rest)
        del rest, gradients
        row = {
            "reader": self.strategy.data.rank,
            "shards": [piece.shard for part in parts.whole for piece in part.pieces],
            "whole": [together.weight, sum(together.sums), sum(together.sizes)],
            "alone": [alone.weight, sum(alone.sums)],
        }
        rows = self._told(row)
        lengths = self._over_ranks(off), self._over_ranks(sizes)
        differs = self._differs(rows, *lengths)
        if differs and self.recomputing.loosen(self._coarsest(parts)):
            differs = self._differs(rows, *lengths)
        return differs or self._of_another(parts, alone, exact=exact)

    def _differs(self, rows: list[dict[str, Any]], off: list[float], sizes: list[float]) -> str:
        shards: set[int] = set()
        for row in rows:
            (weight, loss, size), (weight_alone, loss_alone) = row["whole"], row["alone"]
            shards |= set(row["shards"])
            if weight == weight_alone == 0.0:
                continue  # a rank that counts nothing
            whole = Passed(weight, loss, size, [], [], None)
            words = in_words(row["shards"])
            if text := self.recomputing.sums_differ(words, whole, weight_alone, loss_alone):
                return text
        return self.recomputing.gradients_differ(in_words(sorted(shards)), off, sizes)

    def _over_ranks(self, lengths: list[float]) -> list[float]:
        comm = self.strategy.comm
        squares = torch.tensor(lengths, dtype=torch.float64, device=comm.device).square_()
        comm.all_reduce(squares, "control").wait()
        with comm.reading():
            found: list[float] = squares.sqrt().tolist()
        return found

    def _coarsest(self, parts: PassParts) -> float:
        """The tolerance of the coarsest type on any rank, seen in one more pass of all."""
        again, seen = self._prepared()[0], Coarsest()  # the model may have written on the others
        with seen:
            self._passes(again.alone[: len(parts.alone[:1])], 1)
        return max(float(row) for row in self._told(seen.tolerance))

    def _of_another(self, parts: PassParts, alone: MicroBatchLosses, *, exact: bool) -> str:
        """What another rank has otherwise of a shard, in words."""
        readers = len(self.offers)
        if readers == 1 or not self.can_read:
            return ""
        again, _ = self._passes(parts.of_another, 1)
        rows = self._told(
            {
                "reader": self.strategy.data.rank,
                "own": _sketch(parts.alone, alone, parts.chosen),
                "of_another": _sketch(parts.of_another, again, 0),
            }
        )
        for reader, offer in enumerate(self.offers):
            if offer is None:
                continue
            own = _of(rows, reader, "own")
            other = _of(rows, (reader + 1) % readers, "of_another")
            shard = offer.pieces[self.turn % len(offer.pieces)].shard
            if own and other:
                text = self.recomputing.sketches_differ(shard, own, other, exact)
                if text:
                    return text
        return ""

    def _told(self, own: Any) -> list[Any]:
        """What every rank tells."""
        return [json.loads(text) for text in self.strategy.comm.gather_texts(json.dumps(own))]


def _sketch(parts: list[RecomputedPart], losses: MicroBatchLosses, at: int) -> Sketch:
    """Of one pass with a loss on this rank; empty where there is none."""
    if at >= len(losses.sums):
        return {}
    return {
        "data": digest_of(list(tensors_in(parts[at].data))),
        "digest": repr(losses.sums[at]),
        "weight": 1.0,
        "loss": losses.sums[at],
        "size": losses.sizes[at],
        "outputs": [],
        "gradients": [],
    }


def _of(rows: list[dict[str, Any]], reader: int, name: str) -> Sketch:
    """What the first rank that has a loss tells of a reader."""
    found: Iterator[Sketch] = (row[name] for row in rows if row["reader"] == reader and row[name])
    return next(found, {})


def _own(gradient: Tensor) -> Tensor:
    own = local(gradient.detach())
    return own.to_dense() if own.is_sparse else own


@contextmanager
def _counted_as_control(sent: dict[str, float]) -> Iterator[None]:
    """Within, whatever is sent is of no step."""
    before = dict(sent)
    try:
        yield
    finally:
        moved = sum(sent.values()) - sum(before.values())
        sent.update(before)
        sent["control"] += moved


def _ended(error: Exception) -> RequestError:
    return RequestError(
        asked="--witness warn or stop",
        found=f"passes of single shards that end with {type(error).__name__}: {error}"[:400],
        why="under this strategy all ranks make them together, and wait for this one",
        do="let the model and the loss take any number of samples, or --witness off",
    )
