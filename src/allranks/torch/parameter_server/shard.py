"""The numbers that one server holds, and how they move. No clock, no thread, no wire.

In step, the workers' parts of a gradient add up in the order of the parts, whoever comes first, and
the scheduler says when and by what they are applied; a part that comes twice counts once:

    sum = g_0 + g_1 + … + g_(parts - 1);  w <- optimizer(w, factor · sum)

Out of step each gradient is applied when it comes (Li et al. 2014), with tau the versions that have
passed since the weights that it was computed from:

    plain             w <- optimizer(w, g)
    staleness-aware   the same at the rate  lr / max(1, tau)              Zhang et al., 1511.05950

With mode=delta it is no gradient, but what a worker has changed by itself: w <- w - change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.strategies.cards.parameter_server import PLAIN, STALENESS_AWARE
from allranks.torch.parallel.sharded.gradients import squares_of
from allranks.torch.parameter_server.flat import MANY, Flat, FlatLayout, WeightPiece, are_squares
from allranks.torch.parameter_server.state import Kept, cut_state, join_state
from allranks.torch.step.trainable import update


@dataclass
class Summed:
    """The parts of a step that have come: those up to `parts` in order are added.

    They are added where the worker of the first one has written it, and those that came early stay
    where they are, as long as that memory does not change.
    """

    sum: Flat | None = None
    parts: int = 0
    squares: float | None = None
    """Those of the sum, where the pass that added the last part has found them."""
    early: dict[int, Flat] = field(default_factory=dict)

    def add(self, gradient: Flat, *, is_last: bool) -> None:
        """Add the next part in order."""
        if self.sum is None:
            self.sum = gradient
        elif is_last:
            self.squares = self.sum.add_and_square_(gradient)
        else:
            self.sum.add_(gradient)
        self.parts += 1

    def keep(self, memory: Flat) -> None:
        """This memory changes from here on: what lies there is copied."""
        if self.sum is memory:
            self.sum = memory.copy()
        for part, gradient in self.early.items():
            if gradient is memory:
                self.early[part] = memory.copy()


@dataclass(frozen=True)
class Update:
    """What has made a version of the one before it; without a gradient nothing was updated."""

    version: int
    gradient: Flat | None = None
    said: dict[str, Any] | None = None


class Shard:
    """The weights of one server in a layout, and the optimizer of those alone.

    The `optimizer` was made for the whole model, whose `parameters` it has in its groups; from now
    on it has the pieces of this server in their place, and nothing of the others.
    """

    def __init__(
        self,
        layout: FlatLayout,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        parts: int = 1,
        rate: str = PLAIN,
        *,
        hands_on: bool = False,
    ) -> None:
        self.hands_on = hands_on
        self.last: Update | None = None
        """The newest update, where workers make it as well (`hands_on`)."""
        self._room_of_last: Flat | None = None
        self.layout, self.optimizer, self.parts, self.rate = layout, optimizer, parts, rate
        self.weights = layout.new()
        self.version = 0
        self.applied: set[int] = set()
        """The numbers of the gradients that were applied out of step, since the last `load`."""
        self.pieces = [nn.Parameter(view) for view in self.weights.views]
        self._position = [piece.position for piece in layout.pieces]
        self._pulled: dict[int, int] = {}
        self._summed: Summed | None = None
        held = {id(parameters[at]): [] for at in set(self._position)}  # type: ignore[var-annotated]
        for at, own in zip(self._position, self.pieces, strict=True):
            held[id(parameters[at])].append(own)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [own for p in group["params"] for own in held.get(id(p), ())]

    # --- in step --------------------------------------------------------------------------

    def bring(self, part: int, gradient: Flat) -> bool:
        """A part of the gradient of the step that is going on; whether it is new.

        The sum may lie in its memory, which others are not to change before the step is over,
        unless `keep` is called.
        """
        found = self._summed
        if found is None:
            found = self._summed = Summed()
        if part < found.parts or part in found.early:
            return False
        found.early[part] = gradient
        while (following := found.early.pop(found.parts, None)) is not None:
            found.add(following, is_last=found.parts == self.parts - 1)
        return True

    def keep(self, memory: Flat) -> None:
        """What was brought may change in this memory from here on."""
        if self._summed is not None:
            self._summed.keep(memory)

    @property
    def is_complete(self) -> bool:
        """Whether all parts of the step are there."""
        return self._summed is not None and self._summed.parts == self.parts

    @property
    def gradient(self) -> Flat:
        """The sum of all parts of the step."""
        assert self._summed is not None and self._summed.sum is not None and self.is_complete
        return self._summed.sum

    def squares(self, unused: Collection[int] = ()) -> float:
        """The sum of the squares of the gradient, without the parameters that nobody used.

        Parts have zeros for these; a regularizer has none.
        """
        known = None if self._summed is None else self._summed.squares
        if known is not None:
            return known
        there = self._used(self.gradient, unused) if unused else self.gradient.flats
        parts = [g for g in there if g is not None]
        numbers = sum(g.numel() for g in parts)
        if numbers >= MANY:  # else doubles take less time
            found = float(squares_of(parts, torch.device("cpu")))
            if are_squares(found, numbers):
                return found
        return sum(map(_squares_in_doubles, parts))

    def add(self, more: Flat, factor: float) -> None:
        """The gradient is `factor` times itself plus `more` from here on: of a regularizer."""
        assert self._summed is not None
        self.gradient.scale_(factor)
        self.gradient.add_(more)
        self._summed.squares = None

    def apply(
        self, factor: float, groups: Sequence[dict[str, Any]], unused: Collection[int]
    ) -> None:
        """Update with `factor` times the sum; the step is over."""
        gradient = self.gradient
        gradient.scale_(factor)
        self.pass_over()
        if self.hands_on:
            self._room_of_last = self._room_of_last or self.layout.new()
            self._room_of_last.copy_(gradient)
            said = {"groups": list(groups), "unused": list(unused)}
            self.last = Update(self.version, self._room_of_last, said)
        self.update(gradient, groups, unused)

    def pass_over(self) -> None:
        """The step is over; without `apply`, it has left the weights as they were."""
        self._summed = None
        self.version += 1
        self.last = Update(self.version) if self.hands_on else None

    # --- out of step ----------------------------------------------------------------------

    def push(
        self,
        number: int,
        worker: int,
        gradient: Flat,
        groups: Sequence[dict[str, Any]],
        unused: Collection[int] = (),
    ) -> int | None:
        """Apply the gradient with this number at once; returns its staleness.

        `None` for one that is applied already: a worker that is lost may have brought it to some
        of the servers.
        """
        if self._is_applied(number):
            return None
        stale = self.version - self._pulled.get(worker, self.version)
        slower = self.slower(stale)
        if slower > 1:
            groups = [{**group, "lr": group["lr"] / slower} for group in groups]
        self.update(gradient, groups, unused)
        self.applied.add(number)
        self.version += 1
        return stale

    def change(self, number: int, change: Flat) -> bool:
        """Subtract what a worker has changed, under this number; whether it is new."""
        if self._is_applied(number):
            return False
        for own, less in zip(self.weights.flats, change.flats, strict=True):
            own.sub_(less)
        self.applied.add(number)
        self.version += 1
        return True

    def _is_applied(self, number: int) -> bool:
        return number in self.applied

    def slower(self, stale: int) -> int:
        """The rate is divided by this for a gradient that is so stale."""
        return max(1, stale) if self.rate == STALENESS_AWARE else 1

    def pull(self, worker: int, into: Flat) -> int:
        """Copy the weights for a worker; returns their version."""
        into.copy_(self.weights)
        self._pulled[worker] = self.version
        return self.version

    # --- both -----------------------------------------------------------------------------

    def load(self, weights: Flat, kept: Sequence[Kept]) -> None:
        """Have these weights, and an optimizer that keeps this for them."""
        self.put(weights)
        self.optimizer.state.clear()
        join_state(self.optimizer, self.pieces, self._own_pieces, kept)

    def put(self, weights: Flat) -> None:
        """Have these weights; whoever updates by itself needs all of them."""
        self.weights.copy_(weights)
        self.last = None

    def kept(self) -> list[Kept]:
        """What the optimizer keeps, piece by piece."""
        return cut_state(self.optimizer, self.pieces, self._own_pieces)

    @property
    def _own_pieces(self) -> list[WeightPiece]:
        """The pieces, as wholes of what the optimizer has."""
        held = enumerate(self.layout.pieces)
        return [WeightPiece(n, 0, p.numbers, p.server, is_whole=True) for n, p in held]

    def update(
        self, gradient: Flat, groups: Sequence[dict[str, Any]], unused: Collection[int]
    ) -> None:
        """Update the pieces by this gradient, at the rates that `groups` say."""
        for own, found in zip(self.pieces, self._used(gradient, unused), strict=True):
            own.grad = found
        for group, said in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in said.items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        update(self.optimizer)
        for own in self.pieces:
            own.grad = None

    def _used(self, gradient: Flat, unused: Collection[int]) -> list[Tensor | None]:
        """The gradient of each piece; `None` for parameters that no part has used."""
        without = set(unused)
        pairs = zip(self._position, gradient.views, strict=True)
        return [None if at in without else view for at, view in pairs]

    def begin(self, version: int) -> None:
        """Weights and optimizer were loaded: nothing that was brought before counts any more."""
        self.version, self._summed = version, None
        self._pulled.clear()
        self.applied.clear()


def _squares_in_doubles(gradient: Tensor) -> float:
    """By parts, because each is copied as doubles."""
    kind = torch.promote_types(gradient.dtype, torch.float64)
    parts = gradient.reshape(-1).split(MANY)
    return sum(float(torch.linalg.vector_norm(part, dtype=kind)) ** 2 for part in parts)
