"""Recomputes a micro-batch as a whole and shard by shard, and compares the results.

Called by the witness, between two steps. With the current weights, one micro-batch goes through the
model as a whole, and then piece by piece. The sums of weights and losses, and the gradients, must
be the same up to rounding; otherwise the result depends on how samples are batched. Passes run
without autocast, so that rounding is small; through the model itself, not its compiled form; and
with `torch.autograd.grad`, so that no `.grad` is written.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.errors import RequestError
from allranks.strategies.shards import Micro, Piece
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.data.batch import Batch
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.collate import copied, tensors_in
from allranks.torch.data.loaders import WholeLoader, rows_between
from allranks.torch.data.sources import MapSource, Source, StreamSource
from allranks.torch.random.keyed_rng import UnclearDraw
from allranks.torch.step.gradients import length, length_of_each
from allranks.torch.step.losses import forward, weighted_losses
from allranks.torch.step.step import REGULARIZER, SharedStep
from allranks.torch.step.user_buffers import put_back
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.observed import Roots, plain_state_copy
from allranks.torch.witness.replicas import digest

Sketch = dict[str, Any]
"""Plain numbers of a pass, which another rank compares with its own."""

TOLERANCE = {"fp64": 1e-7, "tf32": 3e-2}  # of the length of a gradient
USUAL_TOLERANCE = 1e-3  # float32: rounding is 1e-6, and a ReLU at its corner may turn over
OF_TYPES: dict[torch.dtype | None, float] = {
    torch.float32: USUAL_TOLERANCE,
    torch.bfloat16: 3e-2,
    torch.float16: 3e-2,
}
LOSS_SHARE = 0.1  # of the tolerance: a loss has no such corners
EVERY_THIRD = 3


@dataclass(frozen=True)
class PassSums:
    """The results of one pass: sums over samples, the gradient, and the regularizer after it."""

    weight: float
    loss: float
    size: float
    gradients: list[Tensor | None]
    outputs: list[Tensor]
    regularizer: float | None


@dataclass(frozen=True)
class RecomputedPart:
    """Pieces of shards and their collated samples, for one pass through the model."""

    pieces: Micro
    data: Any

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)


class Recomputing:
    """Passes over samples of `batch` that leave no trace; `tolerance` is the precision's."""

    def __init__(self, step: SharedStep, batch: Batch, precision: str) -> None:
        self.step, self.batch = step, batch
        self.tolerance = TOLERANCE.get(precision, USUAL_TOLERANCE)
        self.over_batch = step.task.loss_over == "batch"

    def loosen(self, coarsest: float) -> bool:
        """Raise the tolerance to that of the coarsest type in use; returns whether it changed."""
        is_looser, self.tolerance = coarsest > self.tolerance, max(coarsest, self.tolerance)
        return is_looser

    def run(self, part: RecomputedPart, *, regularizer: bool = False) -> PassSums:
        """Run one pass; for a loss over the batch, only its outputs."""
        step = self.step
        step.scope.moments.clear()
        step.scope.enter(self.batch.index, part.pieces, part.samples)
        output = forward(step.task, step.model, part.data)
        if self.over_batch:
            rows = [t.detach() for t in tensors_in(output) if t.is_floating_point()]
            return PassSums(0.0, 0.0, 0.0, [], rows, None)
        losses, weights = weighted_losses(step.task, output, part.data, part.samples)
        total = losses.sum()
        gradients, added = gradients_of(total, step.parameters), None
        if regularizer and step.regularizers.is_there:  # without the looks that a step takes at it
            step.scope.key(self.batch.index, REGULARIZER)
            added = step.task.regularizer(step.model)
        return PassSums(
            weight=float(losses.numel() if weights is None else weights.sum()),
            loss=float(total.detach()),
            size=float(losses.detach().abs().sum()),
            gradients=gradients,
            outputs=[],
            regularizer=None if added is None else float(added.detach()),
        )

    def compare_with_parts(
        self, whole: RecomputedPart, parts: list[RecomputedPart], chosen: int
    ) -> tuple[str, Sketch]:
        """The difference of `whole` and its `parts`, in words, and the chosen part's sketch."""
        joint = self.run(whole, regularizer=True)
        remaining = joint.gradients  # less the gradient of each part
        remaining[:] = [None if g is None else g.clone() for g in remaining]
        sizes = length_of_each(remaining)
        weight = loss = 0.0
        sketch: Sketch = {}
        added, outputs = None, []
        for number, part in enumerate(parts):
            alone = self.run(part, regularizer=number == 0)
            weight, loss = weight + alone.weight, loss + alone.loss
            added = alone.regularizer if number == 0 else added
            outputs.append(alone.outputs)
            if number == chosen:
                sketch = self.sketch(part, alone)
            subtract(remaining, alone.gradients)
        words = in_words(piece.shard for piece in whole.pieces)

        def judged() -> str:
            if self.over_batch:
                return self._outputs_differ(words, joint.outputs, outputs)
            differs = self.sums_differ(words, joint, weight, loss)
            differs = differs or self._regularizer_differs(joint.regularizer, added)
            return differs or self.gradients_differ(words, length_of_each(remaining), sizes)

        differs = judged()
        if differs and self.loosen(self._coarsest_of(parts[0])):
            differs = judged()
        return differs, sketch

    def _coarsest_of(self, part: RecomputedPart) -> float:
        types = Coarsest()
        with types, suppress(Exception):  # its errors are known by now
            self.run(part)
        return types.tolerance

    def sums_differ(self, words: str, whole: PassSums, weight: float, loss: float) -> str:
        if not all(map(math.isfinite, (whole.loss, loss))):
            return ""  # the guard's affair
        if abs(whole.weight - weight) > self.tolerance * LOSS_SHARE * max(whole.weight, 1.0):
            return (
                f"the weight of {words} is {whole.weight:g} and {weight:g}: there are more values "
                "of the loss where batches are padded to their longest sample; say which of them "
                "count with weight(batch)"
            )
        if abs(whole.loss - loss) > self.tolerance * LOSS_SHARE * whole.size:
            return f"the loss of {words} is {whole.loss:.8g} and {loss:.8g}: {COUPLING}"
        return ""

    def _regularizer_differs(self, joint: float | None, alone: float | None) -> str:
        if joint is None or alone is None or not math.isfinite(joint - alone):
            return ""
        if abs(joint - alone) <= self.tolerance * LOSS_SHARE * abs(joint):
            return ""
        return (
            f"the regularizer is {joint:.8g} after one forward pass and {alone:.8g} after "
            "another: it reads what the model keeps of its samples; return that from forward, and "
            "add it in loss"
        )

    def gradients_differ(self, words: str, offsets: list[float], sizes: list[float]) -> str:
        """The first difference of gradients of these `sizes` that are off by `offsets`, or ""."""
        total = math.hypot(*sizes)
        if not math.isfinite(total):
            return ""
        for name, off, size in zip(self.step.names, offsets, sizes, strict=True):
            if off > self.tolerance * (size + total):
                return (
                    f"the gradient of {name!r} for {words} is not the same, by {off / total:.1e} "
                    "of the whole gradient's length: a hook that is not linear (clamp, normalise) "
                    f"or a function that scales by its batch; if not, {COUPLING}"
                )
        return ""

    def _outputs_differ(self, words: str, whole: list[Tensor], parts: list[list[Tensor]]) -> str:
        for number, rows in enumerate(whole):
            tensors = [part[number] for part in parts]
            if any(part.shape[1:] != rows.shape[1:] for part in tensors):
                continue  # padded to the longest: not looked at
            off, size = length([rows - torch.cat(tensors)]), length([rows])
            if math.isfinite(off) and off > self.tolerance * size:
                return f"the outputs for {words} are not the same, by {off / size:.1e}: {COUPLING}"
        return ""

    def sketch(self, part: RecomputedPart, passed: PassSums) -> Sketch:
        """The numbers that another rank compares, which computes the same part."""
        gradients = [torch.zeros(()) if g is None else g for g in passed.gradients]
        return {
            "data": digest(*tensors_in(part.data)),
            "digest": digest(*gradients, *passed.outputs),
            "weight": passed.weight,
            "loss": passed.loss,
            "size": passed.size,
            "outputs": [length([rows]) for rows in passed.outputs],
            "gradients": _fingerprints(gradients),
        }

    def sketches_differ(self, shard: int, here: Sketch, other: Sketch, exact: bool) -> str:
        """The difference of two ranks' results for the same shard, in words."""
        if here["data"] == other["data"] and here["digest"] == other["digest"]:
            return ""
        why = "its samples are others" if here["data"] != other["data"] else STATE
        words, limit = f"of shard {shard}, computed again by another rank, is", self.tolerance / 10
        numbers = [here["loss"], other["loss"], here["weight"], other["weight"]]
        if not all(map(math.isfinite, numbers)):
            return ""
        if abs(here["weight"] - other["weight"]) > limit * max(here["weight"], 1.0):
            return f"the weight {words} {other['weight']:g}, not {here['weight']:g}: {why}"
        if abs(here["loss"] - other["loss"]) > limit * here["size"]:
            return f"the loss {words} {other['loss']:.8g}, not {here['loss']:.8g}: {why}"
        whole = math.hypot(*(three[0] for three in here["gradients"]))
        for name, mine, theirs in zip(
            self.step.names, here["gradients"], other["gradients"], strict=False
        ):
            off = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
            if math.isfinite(off) and off > limit * (mine[0] + whole):
                return f"the gradient of {name!r} {words} not the same, by {off / whole:.1e}: {why}"
        for mine, theirs in zip(here["outputs"], other["outputs"], strict=False):
            if abs(mine - theirs) > limit * mine:
                return f"the output {words} {theirs:.8g} long, not {mine:.8g}: {why}"
        return f"a bit {words} another: {why}" if exact else ""


COUPLING = (
    "samples that go through the model together see each other (statistics of a batch, dropout or "
    "an attention over padding, rows in another order, choices made in collate)"
)
STATE = "the model, the loss or a generator of its own holds something else there"


def in_words(shards: Iterable[int]) -> str:
    """`shards 0, 4 together and one by one`."""
    return f"shards {', '.join(map(str, shards))} together and one by one"


class Coarsest(TorchDispatchMode):
    """Within, observes the types of the inputs and outputs of torch's functions.

    `tolerance` is that of the coarsest type: a part of a model may compute in its own type.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tolerance = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, output)):
            self.tolerance = max(self.tolerance, OF_TYPES.get(tensor.dtype, 0.0))
        return output


def gradients_of(total: Tensor, of: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of `total` in each of these, dense; `None` where it does not depend on it."""
    if not total.requires_grad:
        return [None] * len(of)
    gradients = torch.autograd.grad(total, of, allow_unused=True)
    return [None if g is None else dense(g) for g in gradients]


def dense(gradient: Tensor) -> Tensor:
    """The gradient, detached, as a tensor that is not sparse."""
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def subtract(sums: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """Subtract each gradient that is there from its sum, in place."""
    for position, gradient in enumerate(gradients):
        if gradient is not None:
            before = sums[position]
            sums[position] = -gradient if before is None else before.sub_(gradient)


def _fingerprints(gradients: list[Tensor]) -> list[list[float]]:
    """The length of each gradient, and two sums: equal for equal gradients."""
    rows = []
    for gradient, size in zip(gradients, length_of_each(gradients), strict=True):
        flat = gradient.reshape(-1)
        sums = flat.sum(dtype=torch.float64), flat[::EVERY_THIRD].sum(dtype=torch.float64)
        rows.append([size, *(float(value) for value in sums)])
    return rows


# --- the samples of a part --------------------------------------------------------------------


def read_again(source: Source, epoch: int, ids: list[int], step: SharedStep) -> Any:
    """The samples of these numbers, collated and placed as for a step; read by this thread."""
    if isinstance(source, MapSource) and source.workers:
        source = copy.copy(source)
        source.workers = 0
    (data,) = source.batches([(epoch, np.array(ids, np.int64))])
    return step.precision.to_device(data)


def cut_out(part: RecomputedPart, piece: Piece) -> RecomputedPart:
    """The rows of one piece of a part; raises `RequestError` for data without rows."""
    before = _samples_before(piece, part.pieces)
    data = rows_between(part.data, before, before + piece.samples, part.samples)
    return RecomputedPart((piece,), data)


def _samples_before(piece: Piece, pieces: Micro) -> int:
    return sum(other.samples for other in pieces[: pieces.index(piece)])


@contextmanager
def leaving_no_trace(step: SharedStep, roots: Roots) -> Iterator[None]:
    """Within, passes may run; afterwards, all state that can be restored is as it was."""
    scope, buffers = step.scope, step.user_buffers
    # statistics of the whole batch are those of the step before: no other rank is asked here
    alone = nullcontext() if scope.whole is None else scope.whole.alone()
    with ExitStack() as stack:  # each is put back, whatever another one raises
        stack.callback(plain_state_copy(roots, step.task))
        stack.callback(put_back, buffers.copies())
        stack.callback(vars(buffers).update, {**vars(buffers), "written": set(buffers.written)})
        gradients = [(p, p.grad) for p in step.model.parameters()]
        stack.callback(_put_back_gradients, step, list(step.used), gradients)
        stack.callback(setattr, step, "on_gradient", step.on_gradient)
        stack.callback(lambda: scope.moments.clear())  # with what layers leave until then
        stack.callback(scope.leave)
        stack.callback(setattr, scope, "shortens", scope.shortens)
        step.on_gradient, scope.shortens = None, False
        for parameter in step.model.parameters():
            parameter.grad = None
        with torch.enable_grad(), kept_random_streams(scope.device), alone:
            yield


def _put_back_gradients(
    step: SharedStep, used: list[bool], gradients: Sequence[tuple[Tensor, Tensor | None]]
) -> None:
    step.used[:] = used
    for parameter, gradient in gradients:
        parameter.grad = gradient


# --- second look ---------------------------------------------------------------------------------
# One look of the witness: which shards are recomputed, by which ranks, and from which samples.
#
# Every rank offers one of its micro-batches. The owner of this look computes its own as a whole and
# piece by piece, or, if it is one piece, together with one of another rank. The next rank, the
# helper, reads the chosen piece once more and computes it too. Both gather their results as plain
# numbers, and the witness compares them.


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
        before = _samples_before(piece, self.pieces)
        return self.ids[before : before + piece.samples]


@dataclass(frozen=True)
class SecondLook:
    """The parameters of one look, equal on every rank; `turn` selects the owner and the piece."""

    strategy: Strategy
    batch: Batch
    batches: GlobalBatches
    recomputing: Recomputing
    turn: int
    offers: tuple[Offer | None, ...]

    @property
    def owner(self) -> int:
        """The rank that compares its own micro-batch; there is one, as some rank has a sample."""
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
        """The results of this rank. Leaves no trace, and raises nothing: training may go on."""
        if rank not in (self.owner, self.helper):
            return {}
        try:
            with leaving_no_trace(self.strategy.step, roots):
                return self._as_owner() if rank == self.owner else self._as_helper()
        except UnclearDraw as error:
            return {"differs": f"{error.asked}: {error.found}; {error.why}"}
        except RequestError as error:  # data that cannot be copied, or has no rows
            return {"unseen": f"no shard was computed again: {error.found}; {error.why}"[:400]}
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return {"unseen": f"a shard computed again ended with {reason}"[:400]}

    def _as_owner(self) -> dict[str, Any]:
        whole, parts = self._whole_and_parts()
        chosen = whole.pieces.index(self.chosen)
        differs, sketch = self.recomputing.compare_with_parts(whole, parts, chosen)
        unseen = "" if self.can_read else NO_REREADING
        return {"differs": differs, "sketch": sketch, "unseen": unseen}

    def _whole_and_parts(self) -> tuple[RecomputedPart, list[RecomputedPart]]:
        """The part for one pass, and each of its pieces."""
        offer, micro = self.offer, self.batch.micros[self.offer.micro]
        # a copy: a model may write on its inputs, and the step has not been made yet
        whole = RecomputedPart(offer.pieces, copied(micro.data))
        goes_alone = self.strategy.shard_alone or self.batches.collate_draws
        if len(offer.pieces) == 1 and self.can_read and not goes_alone:
            whole = self._with_another() or whole
        if self.can_read:
            parts = [self._read(piece) for piece in whole.pieces]
        else:
            uncut = RecomputedPart(whole.pieces, copied(micro.data))
            parts = [cut_out(uncut, piece) for piece in whole.pieces]
        return whole, parts

    def _as_helper(self) -> dict[str, Any]:
        if not self.can_read:
            return {}
        part = self._read(self.chosen)
        return {"sketch": self.recomputing.sketch(part, self.recomputing.run(part))}

    def _with_another(self) -> RecomputedPart | None:
        """The owner's piece together with the first of another rank, or of its own next pass."""
        for other in self._others():
            if other.pieces[0] != self.chosen:
                both = sorted((self.chosen, other.pieces[0]), key=lambda p: (p.shard, p.start))
                ids = [number for piece in both for number in self._ids(piece)]
                return RecomputedPart(tuple(both), self._data(ids))
        return None

    def _others(self) -> list[Offer]:
        behind = (*self.offers[self.owner + 1 :], *self.offers[: self.owner])
        known = (*behind, Offer.of(self.batch, self.offer.micro + 1))
        return [offer for offer in known if offer is not None]

    def _ids(self, piece: Piece) -> tuple[int, ...]:
        offer = next(o for o in (self.offer, *self._others()) if piece in o.pieces)
        return offer.ids_of(piece)

    def _read(self, piece: Piece) -> RecomputedPart:
        return RecomputedPart((piece,), self._data(self._ids(piece)))

    def _data(self, ids: Iterable[int]) -> Any:
        """Samples by their numbers, collated and placed: copies, where collate hands them on."""
        assert not isinstance(self.batches.source, (StreamSource, WholeLoader))
        return copied(read_again(self.batches.source, self.batch.epoch, [*ids], self.strategy.step))
