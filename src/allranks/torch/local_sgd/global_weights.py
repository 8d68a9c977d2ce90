"""The global weights, which all learners share: flat tensors, grouped into fragments.

A fragment is the unit of exchange: some of the parameters, as one flat tensor for each dtype. Its
`delta` lies in shared memory where the ranks have some.

Outer optimizers: they update the global weights after each block of local steps.

Every learner begins a block at `start`, makes H local steps and ends at w_k. d is the mean of
`start - w_k` over the learners: old minus new, a pseudo-gradient with the sign of a gradient.

    average          w <- w - d                                             local SGD, Stich 2019
    nesterov         b <- m b + d;  w <- w - lr (d + m b)                  DiLoCo, arXiv 2311.08105
    slowmo           u <- beta u + d / g;  w <- w - alpha g u  (g: the inner rate)    1910.00643
    block-momentum   v <- m v + z d;  w <- w - v         Chen and Huo 2016; the next block begins at
                     paper: w - m v (Nesterov); classical: w; cntk: w, which moves by (1 + m) v

CNTK's documents call `cntk` the paper's Nesterov form; its code, and fairseq's, is the classical
form with another block rate. All are elementwise, so a shard moves as it would in the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.torch.checkpoint.state import is_dtensor, local
from allranks.torch.model.reals import reals
from allranks.torch.strategies.layout import dtensor

PAPER, CLASSICAL, CNTK = "paper", "classical", "cntk"
FORMS = (PAPER, CLASSICAL, CNTK)


class OuterOptimizer(ABC):
    """Updates one flat tensor of global weights. `momentum` is its state, if it has any."""

    keeps: int = 1
    """How many numbers of state it has for each weight."""

    def __init__(self) -> None:
        self.momentum: Tensor | None = None

    @abstractmethod
    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        """Update `weights` in place by `delta`, the mean of old minus new; both (n,).

        `rate` is the inner optimizer's learning rate in the last step of the block. Sends nothing:
        every learner calls this with the same numbers and gets the same weights.
        """

    def start(self, weights: Tensor) -> Tensor:
        """Where the learners begin the next block: `weights` itself, or a new tensor."""
        return weights

    def _accumulate(self, delta: Tensor, momentum: float, factor: float = 1.0) -> Tensor:
        """The momentum after this block: m times the old one, plus `factor` times `delta`."""
        if self.momentum is None:
            self.momentum = delta.new_zeros(delta.shape)
        return self.momentum.mul_(momentum).add_(delta, alpha=factor)


class Average(OuterOptimizer):
    """The mean of the learners' weights."""

    keeps = 0

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        weights.sub_(delta)


class Nesterov(OuterOptimizer):
    """SGD with Nesterov momentum, as torch's: DiLoCo. With lr = 1 and no momentum the mean."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr, self.factor = lr, momentum
        self.keeps = int(momentum != 0)

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        if self.factor:
            buffer = self._accumulate(delta, self.factor)
            weights.sub_(buffer, alpha=self.lr * self.factor)
        weights.sub_(delta, alpha=self.lr)


class SlowMo(OuterOptimizer):
    """Momentum in units of the inner rate, so that a schedule does not change the momentum."""

    def __init__(self, alpha: float = 1.0, beta: float = 0.7) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        if rate == 0:  # nothing has moved
            return
        buffer = self._accumulate(delta, self.beta, 1 / rate)
        weights.sub_(buffer, alpha=self.alpha * rate)


class BlockMomentum(OuterOptimizer):
    """BMUF. `momentum` 1 - 1/K for K learners makes each block count as much as in plain SGD."""

    def __init__(self, momentum: float, rate: float = 1.0, form: str = PAPER) -> None:
        super().__init__()
        self.factor, self.rate, self.form = momentum, rate, form
        self.keeps = 2 if form == PAPER else 1  # with where the next block begins

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        buffer = self._accumulate(delta, self.factor, self.rate)
        weights.sub_(buffer, alpha=1 + self.factor if self.form == CNTK else 1.0)

    def start(self, weights: Tensor) -> Tensor:
        if self.form != PAPER or self.momentum is None:
            return weights
        return weights.sub(self.momentum, alpha=self.factor)


Named = Sequence[tuple[str, Tensor]]
Zeros = Callable[[int, Tensor], Tensor]


class FlatWeights:
    """Tensors of one dtype that a learner trains, and the global weights for them.

    `live` are those tensors, (name, tensor) in the order of the model; `weights` are the global
    ones, (n,). A learner begins a block at `start` and sends `delta`.
    """

    def __init__(self, live: Named, optimizer: OuterOptimizer, zeros: Zeros) -> None:
        self.names = [name for name, _ in live]
        self.live = [reals(tensor) for _, tensor in live]
        self.optimizer = optimizer
        self._sizes = [tensor.numel() for tensor in self.live]
        self.delta = zeros(sum(self._sizes), self.live[0])
        self.weights = torch.cat([tensor.flatten() for tensor in self.live])
        self.start = self.weights

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the live tensors."""
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(live.shape) for part, live in zip(parts, self.live, strict=True)]

    def compute_delta(self, share: float) -> Tensor:
        """Write `share` times (old - new) of this learner since its block began into `delta`."""
        new, old = self.views(self.delta), self.views(self.start)
        for into, begun, live in zip(new, old, self.live, strict=True):
            torch.sub(begun, live, out=into)
        return self.delta.mul_(share) if share else self.delta.zero_()

    def apply_mean(self, mean: Tensor, rate: float, mix: float) -> None:
        """Update the global weights by the mean delta; the learner continues from there.

        The learner keeps the fraction `mix` of its local weights.
        """
        self.optimizer.step(self.weights, mean[: self.weights.numel()], rate)
        self.start = self.optimizer.start(self.weights)
        for live, start in zip(self.live, self.views(self.start), strict=True):
            if mix:
                live.lerp_(start, 1 - mix)
            else:
                live.copy_(start)


@dataclass(frozen=True)
class Fragment:
    """Weights that are exchanged together, `offset` steps into each block."""

    flats: tuple[FlatWeights, ...]
    offset: int


class GlobalWeights:
    """All global weights: parameters by fragment, and buffers, which go with the last fragment.

    `make` makes an outer optimizer for each flat tensor of parameters; buffers are averaged.
    `zeros` is called alike on all ranks of the exchange.
    """

    def __init__(
        self,
        parameters: Named,
        buffers: Named,
        make: Callable[[], OuterOptimizer],
        offsets: Sequence[int],
        zeros: Zeros,
    ) -> None:
        cut = in_fragments(parameters, len(offsets))
        self.fragments = [
            Fragment(tuple(FlatWeights(same, make(), zeros) for same in by_type(named)), offset)
            for named, offset in zip(cut, offsets, strict=True)
        ]
        self.buffers = tuple(FlatWeights(same, Average(), zeros) for same in by_type(buffers))
        self._parameters = [flat for fragment in self.fragments for flat in fragment.flats]

    @property
    def flats(self) -> list[FlatWeights]:
        """All of them."""
        return [*self._parameters, *self.buffers]

    def swap(self) -> None:
        """Swap live tensors and global weights; a second call swaps them back."""
        with torch.no_grad():
            for flat in self.flats:
                for live, view in zip(flat.live, flat.views(flat.weights), strict=True):
                    copy = live.clone()
                    live.copy_(view)
                    view.copy_(copy)

    # --- state: loaded through the live tensors, which belong to a complete model -----------

    @property
    def has_momentum(self) -> bool:
        return any(flat.optimizer.momentum is not None for flat in self._parameters)

    @contextmanager
    def momentum_in_place(self) -> Iterator[None]:
        """Within, the live parameters hold the momentum of the outer optimizers."""
        saved = [[live.clone() for live in flat.live] for flat in self._parameters]
        with torch.no_grad():
            for flat in self._parameters:
                momentum = flat.optimizer.momentum
                momentum = torch.zeros_like(flat.weights) if momentum is None else momentum
                torch._foreach_copy_(flat.live, flat.views(momentum))
            yield
            for flat, tensors in zip(self._parameters, saved, strict=True):
                torch._foreach_copy_(flat.live, tensors)

    def load_momentum(self) -> None:
        """Set the momentum of the outer optimizers to the values of the live parameters."""
        for flat in self._parameters:
            flat.optimizer.momentum = torch.cat([live.flatten() for live in flat.live])

    def restart(self) -> None:
        """Set the global weights to the live tensors, and begin a new block."""
        with torch.no_grad():
            for flat in self.flats:
                torch.cat([live.flatten() for live in flat.live], out=flat.weights)
                flat.start = flat.optimizer.start(flat.weights)
                torch._foreach_copy_(flat.live, flat.views(flat.start))

    def live(self) -> dict[str, Tensor]:
        """Copies of what this learner trains, by name."""
        return {n: t.clone() for f in self.flats for n, t in zip(f.names, f.live, strict=True)}

    def load_live(self, live: Mapping[str, Tensor]) -> bool:
        """Load what `live` returned; returns False if names or shapes differ."""
        tensors = {n: t for f in self.flats for n, t in zip(f.names, f.live, strict=True)}
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in live.items()}:
            return False
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(live[name])
        return True


def in_fragments(named: Named, count: int) -> list[Named]:
    """Split parameters, in the order of the model, into runs of about as many bytes each."""
    total, filled = sum(tensor.nbytes for _, tensor in named), 0
    fragments: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    for name, tensor in named:
        middle = filled + tensor.nbytes / 2
        fragments[min(count - 1, int(count * middle / max(total, 1)))].append((name, tensor))
        filled += tensor.nbytes
    return list(fragments)


def by_type(named: Named) -> list[Named]:
    """The same tensors, as one list for each dtype."""
    kinds = dict.fromkeys(reals(tensor).dtype for _, tensor in named)
    return [[(n, t) for n, t in named if reals(t).dtype == kind] for kind in kinds]


# --- learner state -------------------------------------------------------------------------------
# The state of one learner as plain tensors, also where its ranks hold shards.


def as_parts(state: Any) -> Any:
    """A state in which each DTensor is replaced by the local tensor of this rank."""
    if isinstance(state, Tensor):
        return local(state)
    if isinstance(state, dict):
        return {name: as_parts(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(as_parts(value) for value in state)
    return state


def as_it_was(parts: Any, like: Any) -> Any:
    """The inverse of `as_parts`; `like` has the structure. No communication."""
    if isinstance(parts, Tensor):
        if not (isinstance(like, Tensor) and is_dtensor(like)) or local(like).shape != parts.shape:
            return parts
        placed: Any = like
        return dtensor(parts, placed.device_mesh, placed.placements, placed)
    if isinstance(parts, dict):
        named = like if isinstance(like, dict) else {}
        return {name: as_it_was(value, named.get(name)) for name, value in parts.items()}
    if type(parts) in (list, tuple):
        is_alike = type(like) is type(parts) and len(like) == len(parts)
        others: Any = like if is_alike else [None] * len(parts)
        return type(parts)(as_it_was(*pair) for pair in zip(parts, others, strict=True))
    return parts
