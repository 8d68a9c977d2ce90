"""The weights of one server, and their updates. No clock, no thread, no communication.

Synchronous mode: the workers' parts of a gradient are added in the order of the parts, whatever
their order of arrival. A part that arrives twice counts once. The scheduler applies the sum:

    sum = g_0 + g_1 + … + g_(parts - 1);  w <- optimizer(w, factor · sum)

Asynchronous mode: each gradient is applied on arrival (Li et al. 2014). It is tau versions older
than the weights:

    plain             w <- optimizer(w, g)
    staleness-aware   the same at the rate  lr / max(1, tau)              Zhang et al., 1511.05950

mode=delta: a worker pushes the change of its weights instead of a gradient: w <- w - change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.strategies.cards.parameter_server import PLAIN, STALENESS_AWARE
from allranks.torch.parallel.sharded.gradients import squares_of
from allranks.torch.parameter_server.flat import Flat, FlatLayout, WeightPiece, cut
from allranks.torch.step.trainable import update

MANY = 2**17
"""From so many numbers on squares are summed in their own type by short rows, else in float64."""
LEAST_SQUARE = 1e-30  # mean square of a number; a smaller one may underflow in 32 bits


@dataclass
class Summed:
    """The parts of a step that have arrived: the first `parts` in order are added.

    The sum is in the memory of part 0. Parts that arrive early stay in the memory of their push,
    as long as it does not change.
    """

    sum: Flat | None = None
    parts: int = 0
    early: dict[int, Flat] = field(default_factory=dict)

    def add(self, gradient: Flat) -> None:
        """Add the next part in order."""
        if self.sum is None:
            self.sum = gradient
        else:
            self.sum.add_(gradient)
        self.parts += 1

    def keep(self, memory: Flat) -> None:
        """This memory is about to change: copy the gradient in it."""
        if self.sum is memory:
            self.sum = memory.copy()
        for part, gradient in self.early.items():
            if gradient is memory:
                self.early[part] = memory.copy()


@dataclass(frozen=True)
class Update:
    """The update which made a version; without a gradient the weights did not change."""

    version: int
    gradient: Flat | None = None
    settings: dict[str, Any] | None = None


class Shard:
    """The weights of one server in a layout, and the optimizer of those alone.

    The groups of `optimizer` have the whole model's `parameters`; here they are replaced with the
    pieces of this server.
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
        """The newest update, if workers also apply it (`hands_on`)."""
        self._room_of_last: Flat | None = None
        self.layout, self.optimizer, self.parts, self.rate = layout, optimizer, parts, rate
        self.weights = layout.new()
        self.version = 0
        self.applied: set[int] = set()
        """The numbers of the gradients pushed and applied since the last `load`."""
        self.pieces = [nn.Parameter(view) for view in self.weights.views]
        self._position = [piece.position for piece in layout.pieces]
        self._pulled: dict[int, int] = {}
        self._summed: Summed | None = None
        pieces_of = {id(parameters[at]): [] for at in set(self._position)}  # type: ignore[var-annotated]
        for at, param in zip(self._position, self.pieces, strict=True):
            pieces_of[id(parameters[at])].append(param)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [param for p in group["params"] for param in pieces_of.get(id(p), ())]

    # --- in step --------------------------------------------------------------------------

    def add_part(self, part: int, gradient: Flat) -> bool:
        """Add a part to the gradient of the current step; `False` if it was added before.

        The sum may use its memory: call `keep` before you change that within the step.
        """
        summed = self._summed
        if summed is None:
            summed = self._summed = Summed()
        if part < summed.parts or part in summed.early:
            return False
        summed.early[part] = gradient
        while (following := summed.early.pop(summed.parts, None)) is not None:
            summed.add(following)
        return True

    def keep(self, memory: Flat) -> None:
        """This memory is about to change: copy a part that is in it."""
        if self._summed is not None:
            self._summed.keep(memory)

    @property
    def is_complete(self) -> bool:
        """Whether all parts of the step have arrived."""
        return self._summed is not None and self._summed.parts == self.parts

    @property
    def gradient(self) -> Flat:
        """The sum of all parts of the step."""
        assert self._summed is not None and self._summed.sum is not None and self.is_complete
        return self._summed.sum

    def squares(self, unused: Collection[int] = ()) -> float:
        """The sum of the squares of the gradient, without `unused` parameters.

        Parts have zeros for these, and a regularizer has no gradient.
        """
        there = self._used(self.gradient, unused) if unused else self.gradient.flats
        parts = [g for g in there if g is not None]
        numbers = sum(g.numel() for g in parts)
        if numbers >= MANY:  # else doubles take less time
            squares = float(squares_of(parts, torch.device("cpu")))
            if isnan(squares) or LEAST_SQUARE * numbers < squares < inf:
                return squares
        return sum(map(_squares_in_doubles, parts))

    def add(self, more: Flat, factor: float) -> None:
        """Set the gradient to `factor` times itself plus `more`, that of a regularizer."""
        self.gradient.scale_(factor)
        self.gradient.add_(more)

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
            settings = {"groups": list(groups), "unused": list(unused)}
            self.last = Update(self.version, self._room_of_last, settings)
        self.update(gradient, groups, unused)

    def pass_over(self) -> None:
        """End the step; without `apply` the weights do not change."""
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

        `None` if it was applied before: a lost worker may have pushed it to some of the servers.
        """
        if number in self.applied:
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
        """Subtract a worker's change with this number; `False` if it was applied before."""
        if number in self.applied:
            return False
        for weights, less in zip(self.weights.flats, change.flats, strict=True):
            weights.sub_(less)
        self.applied.add(number)
        self.version += 1
        return True

    def slower(self, stale: int) -> int:
        """The divisor of the learning rate for a gradient of this staleness."""
        return max(1, stale) if self.rate == STALENESS_AWARE else 1

    def pull(self, worker: int, into: Flat) -> int:
        """Copy the weights for a worker; returns their version."""
        into.copy_(self.weights)
        self._pulled[worker] = self.version
        return self.version

    # --- both -----------------------------------------------------------------------------

    def load(self, weights: Flat, states: Sequence[PieceState]) -> None:
        """Load weights, and the optimizer state of each piece."""
        self.put(weights)
        self.optimizer.state.clear()
        join_state(self.optimizer, self.pieces, self._local_pieces, states)

    def put(self, weights: Flat) -> None:
        """Load weights; workers with their own update need all of them."""
        self.weights.copy_(weights)
        self.last = None

    def optimizer_state(self) -> list[PieceState]:
        """The optimizer state, piece by piece."""
        return cut_state(self.optimizer, self.pieces, self._local_pieces)

    @property
    def _local_pieces(self) -> list[WeightPiece]:
        """The pieces as whole parameters of this optimizer."""
        pieces = enumerate(self.layout.pieces)
        return [WeightPiece(n, 0, p.numbers, p.server, is_whole=True) for n, p in pieces]

    def update(
        self, gradient: Flat, groups: Sequence[dict[str, Any]], unused: Collection[int]
    ) -> None:
        """Update the pieces by this gradient, with the hyperparameters in `groups`."""
        for param, grad in zip(self.pieces, self._used(gradient, unused), strict=True):
            param.grad = grad
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in settings.items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        update(self.optimizer)
        for param in self.pieces:
            param.grad = None

    def _used(self, gradient: Flat, unused: Collection[int]) -> list[Tensor | None]:
        """The gradient of each piece; `None` for `unused` parameters."""
        without = set(unused)
        pairs = zip(self._position, gradient.views, strict=True)
        return [None if at in without else view for at, view in pairs]

    def begin(self, version: int) -> None:
        """Begin at `version` after a load: drop all earlier parts and pushes."""
        self.version, self._summed = version, None
        self._pulled.clear()
        self.applied.clear()


def _squares_in_doubles(gradient: Tensor) -> float:
    """In parts, because each is copied to float64."""
    kind = torch.promote_types(gradient.dtype, torch.float64)
    parts = gradient.reshape(-1).split(MANY)
    return sum(float(torch.linalg.vector_norm(part, dtype=kind)) ** 2 for part in parts)


# --- optimizer state -----------------------------------------------------------------------------
# Cut into pieces for the servers, and joined again.
#
# The scheduler has the whole state for checkpoints; a server has that of its pieces. A tensor with
# as many numbers as its parameter is cut with it; anything else, such as a step count, is copied.


PieceState = dict[str, Any]
PLAIN_VALUES = (bool, int, float, str, type(None))


def cut_state(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], pieces: Sequence[WeightPiece]
) -> list[PieceState]:
    """The state of an optimizer of whole `parameters`, cut for each of the pieces."""
    return [
        _cut_one(optimizer.state.get(parameters[p.position], {}), p, parameters) for p in pieces
    ]


def _cut_one(
    state: Mapping[str, Any], piece: WeightPiece, parameters: Sequence[nn.Parameter]
) -> PieceState:
    whole = parameters[piece.position].numel()

    def of_piece(value: Any) -> Any:
        if isinstance(value, Tensor) and not piece.is_whole and value.numel() == whole:
            return cut(value, piece)
        return value

    return {name: of_piece(value) for name, value in state.items()}


@torch.no_grad()
def join_state(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    pieces: Sequence[WeightPiece],
    states: Sequence[PieceState],
) -> None:
    """Copy the `states` of these pieces into the state of an optimizer of whole parameters."""
    for piece, state in zip(pieces, states, strict=True):
        parameter = parameters[piece.position]
        whole_state = optimizer.state[parameter]
        for name, value in state.items():
            is_part = isinstance(value, Tensor) and value.numel() == piece.numbers
            if piece.is_whole or not is_part or value.numel() == parameter.numel():
                whole_state[name] = value
                continue
            there = whole_state.get(name)
            if not isinstance(there, Tensor) or there.numel() != parameter.numel():
                there = whole_state[name] = value.new_empty(parameter.shape)
            cut(there, piece).copy_(value)


def plain_hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group which a message can carry: numbers, strings, lists.

    Others stay on the servers as the task created them.
    """

    def is_plain(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(is_plain, value))
        return isinstance(value, PLAIN_VALUES)

    def plain(value: Any) -> Any:
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value

    groups = [{n: plain(v) for n, v in g.items()} for g in optimizer.param_groups]
    return [{n: v for n, v in g.items() if n != "params" and is_plain(v)} for g in groups]
