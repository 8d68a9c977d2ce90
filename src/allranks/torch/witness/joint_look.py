"""The second look for passes that communicate: all ranks run it together.

No rank holds the weights for a pass by itself. So each chooses one of its micro-batches. All ranks
run theirs through the model as a whole, then shard by shard, then with one shard of the rank
before, each as often as the rank with the most passes (`Strategy.recompute`). Losses and weights
are compared rank by rank, gradients over all ranks, because passes may have summed them. Precision
and autocast are those of the job, and the memory is that of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from allranks.errors import AllranksError, RequestError
from allranks.torch.checkpoint.state import local
from allranks.torch.data.batch import Batch, Leaf, MicroBatch
from allranks.torch.data.batches import NO_IDS
from allranks.torch.data.collate import copied, tensors_in
from allranks.torch.step.gradients import length_of_each
from allranks.torch.step.probes import StepProbe
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.observed import Roots
from allranks.torch.witness.recompute import (
    NO_REREADING,
    Coarsest,
    PassSums,
    RecomputedPart,
    SecondLook,
    Sketch,
    dense,
    in_words,
    leaving_no_trace,
    subtract,
)
from allranks.torch.witness.replicas import digest

ALONE = "each shard goes through the model alone, and none was computed again by another rank"
OVER_BATCH = "no shard was computed again: passes communicate, and the loss is over the batch"


def why_none(strategy: Strategy) -> str:
    """Why all ranks do not look together under a strategy; "" if they do."""
    if strategy.shard_alone:
        return ALONE
    return OVER_BATCH if strategy.task.loss_over == "batch" else ""


@dataclass
class MicroBatchLosses(StepProbe):
    """The probe of these passes: the sum of the losses of each micro-batch, and its size."""

    sums: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    weight: float = 0.0

    def losses(self, losses: Tensor) -> None:
        self.sums.append(float(losses.sum()))
        self.sizes.append(float(losses.abs().sum()))


@dataclass(frozen=True)
class PassParts:
    """The parts that one rank runs through the model, in the order of the passes."""

    whole: list[RecomputedPart]
    alone: list[RecomputedPart]
    neighbour: list[RecomputedPart]
    chosen: int = 0


@dataclass(frozen=True)
class JointLook(SecondLook):
    """The look of one rank; the `offers` are those of the ranks that read the batch."""

    is_memory_short: bool = False

    @property
    def owner(self) -> int:
        """Every rank compares its own."""
        return self.strategy.data.rank

    def run_together(self, roots: Roots, *, exact: bool) -> tuple[str, str]:
        """The difference, and what was not checked, equal on all ranks; every rank calls this."""
        step, sent_bytes = self.strategy.step, self.strategy.comm.sent_bytes
        for parameter in step.model.parameters():
            parameter.grad = None  # those of the step before, which the next one does not read
        with _counted_as_control(sent_bytes), leaving_no_trace(step, roots):
            parts, failed = self._prepared()
            about = {"failed": failed, "passes": len(parts.alone)}
            rows = self.strategy.comm.gather_values(about)
            if unseen := next(filter(None, (row["failed"] for row in rows)), ""):
                return "", unseen
            most = max(row["passes"] for row in rows)
            try:
                differs = self._compared(parts, most, exact=exact)
            except (AllranksError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise _ended(error) from error
        return differs, "" if self.can_read else NO_REREADING

    # --- what goes through ----------------------------------------------------------------

    def _prepared(self) -> tuple[PassParts, str]:
        """The samples of this rank, or why it has none. No other rank waits for it yet."""
        try:
            return self._parts(), ""
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return PassParts([], [], []), f"the samples of a shard were not there again: {reason}"[
                :400
            ]

    def _parts(self) -> PassParts:
        offers, reader = self.offers, self.strategy.data.rank
        for needed in (self.batch.spare, *self.batch.micros[:1]):
            if needed is not None:
                copied(needed.data)  # if it cannot be copied, raises here, where no rank waits
        neighbour: list[RecomputedPart] = []
        if self.can_read and (before := offers[reader - 1]) is not None and len(offers) > 1:
            piece = before.pieces[self.turn % len(before.pieces)]
            neighbour = [RecomputedPart((piece,), self._data(before.ids_of(piece)))]
        if offers[reader] is None:
            return PassParts([], [], neighbour)
        whole, alone = self._whole_and_parts()
        return PassParts([whole], alone, neighbour, whole.pieces.index(self.chosen))

    def _with_another(self) -> RecomputedPart | None:
        """Only where memory is not short: a pass of two micro-batches may not fit a device."""
        on_host = self.strategy.comm.device.type == "cpu"
        return super()._with_another() if on_host and not self.is_memory_short else None

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
        """Losses and gradients of these parts on this rank; all ranks run as many passes."""
        step, losses = self.strategy.step, MicroBatchLosses()
        with step.recomputing(losses):
            losses.weight = self.strategy.recompute(self._batch(parts, passes)).weight
        gradients = [p.grad for p in step.parameters]
        return losses, [None if g is None else dense(local(g)) for g in gradients]

    # --- what is compared -----------------------------------------------------------------

    def _compared(self, parts: PassParts, most: int, *, exact: bool) -> str:
        whole, remaining = self._passes(parts.whole, 1)
        sizes = length_of_each(remaining)
        alone, gradients = self._passes(parts.alone, most)
        subtract(remaining, gradients)
        off = length_of_each(remaining)
        del remaining, gradients
        row = {
            "reader": self.strategy.data.rank,
            "shards": [piece.shard for part in parts.whole for piece in part.pieces],
            "whole": [whole.weight, sum(whole.sums), sum(whole.sizes)],
            "alone": [alone.weight, sum(alone.sums)],
        }
        rows = self.strategy.comm.gather_values(row)
        lengths = self._over_ranks(off), self._over_ranks(sizes)
        differs = self._differs(rows, *lengths)
        if differs and self.recomputing.loosen(self._coarsest(parts)):
            differs = self._differs(rows, *lengths)
        return differs or self._neighbour_differs(parts, alone, exact=exact)

    def _differs(self, rows: list[dict[str, Any]], off: list[float], sizes: list[float]) -> str:
        shards: set[int] = set()
        for row in rows:
            (weight, loss, size), (weight_alone, loss_alone) = row["whole"], row["alone"]
            shards |= set(row["shards"])
            if weight == weight_alone == 0.0:
                continue  # a rank that counts no samples
            whole = PassSums(weight, loss, size, [], [], None)
            words = in_words(row["shards"])
            if text := self.recomputing.sums_differ(words, whole, weight_alone, loss_alone):
                return text
        return self.recomputing.gradients_differ(in_words(sorted(shards)), off, sizes)

    def _over_ranks(self, lengths: list[float]) -> list[float]:
        comm = self.strategy.comm
        squares = torch.tensor(lengths, dtype=torch.float64, device=comm.device).square_()
        comm.all_reduce(squares, "control").wait()
        with comm.reading():
            sums: list[float] = squares.sqrt().tolist()
        return sums

    def _coarsest(self, parts: PassParts) -> float:
        """The tolerance of the coarsest type on any rank, from one more pass of all ranks."""
        again, types = self._prepared()[0], Coarsest()  # the model may have written on the others
        with types:
            self._passes(again.alone[: len(parts.alone[:1])], 1)
        return float(max(self.strategy.comm.gather_values(types.tolerance)))

    def _neighbour_differs(self, parts: PassParts, alone: MicroBatchLosses, *, exact: bool) -> str:
        """The difference that another rank finds for the same shard, in words."""
        readers = len(self.offers)
        if readers == 1 or not self.can_read:
            return ""
        again, _ = self._passes(parts.neighbour, 1)
        rows = self.strategy.comm.gather_values(
            {
                "reader": self.strategy.data.rank,
                "own": _sketch(parts.alone, alone, parts.chosen),
                "of_another": _sketch(parts.neighbour, again, 0),
            }
        )
        for reader, offer in enumerate(self.offers):
            if offer is None:
                continue
            mine = _sketch_of(rows, reader, "own")
            other = _sketch_of(rows, (reader + 1) % readers, "of_another")
            shard = offer.pieces[self.turn % len(offer.pieces)].shard
            if mine and other:
                text = self.recomputing.sketches_differ(shard, mine, other, exact)
                if text:
                    return text
        return ""


def _sketch(parts: list[RecomputedPart], losses: MicroBatchLosses, at: int) -> Sketch:
    """The sketch of one pass with a loss on this rank; empty if there is none."""
    if at >= len(losses.sums):
        return {}
    return {
        "data": digest(*tensors_in(parts[at].data)),
        "digest": repr(losses.sums[at]),
        "weight": 1.0,
        "loss": losses.sums[at],
        "size": losses.sizes[at],
        "outputs": [],
        "gradients": [],
    }


def _sketch_of(rows: list[dict[str, Any]], reader: int, name: str) -> Sketch:
    """The sketch of a reader from the first rank that has a loss."""
    known: Iterator[Sketch] = (row[name] for row in rows if row["reader"] == reader and row[name])
    return next(known, {})


@contextmanager
def _counted_as_control(sent_bytes: dict[str, float]) -> Iterator[None]:
    """Within, all bytes sent are counted as control, and belong to no step."""
    before = dict(sent_bytes)
    try:
        yield
    finally:
        moved = sum(sent_bytes.values()) - sum(before.values())
        sent_bytes.update(before)
        sent_bytes["control"] += moved


def _ended(error: Exception) -> RequestError:
    return RequestError(
        asked="--witness warn or stop",
        found=f"passes of single shards that end with {type(error).__name__}: {error}"[:400],
        why="under this strategy all ranks make them together, and wait for this one",
        do="let the model and the loss take any number of samples, or --witness off",
    )
