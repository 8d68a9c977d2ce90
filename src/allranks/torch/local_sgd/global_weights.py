"""The weights that learners agree on, apart from those that each trains: flat, by fragments.

A fragment is what is exchanged at one time: some of the parameters, in one flat tensor for each
type of number. Its `found` lies in memory that the ranks share, where they share some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.catalog import DTENSORS, load
from allranks.torch.checkpoint.tree import is_dtensor, local
from allranks.torch.local_sgd.optimizers import OuterOptimizer
from allranks.torch.model.reals import reals

Named = Sequence[tuple[str, Tensor]]
Zeros = Callable[[int, Tensor], Tensor]


class FlatWeights:
    """Tensors of one type that a learner trains, with the global weights of all learners for them.

    `live` are those tensors, (name, tensor) in the order of the model; `weights` are the global
    ones, (n,). A learner begins a block at `start`; `found` is what it sends.
    """

    def __init__(self, live: Named, optimizer: OuterOptimizer, zeros: Zeros) -> None:
        self.names = [name for name, _ in live]
        self.live = [reals(tensor) for _, tensor in live]
        self.optimizer = optimizer
        self._sizes = [tensor.numel() for tensor in self.live]
        self.found = zeros(sum(self._sizes), self.live[0])
        self.weights = torch.cat([tensor.flatten() for tensor in self.live])
        self.start = self.weights

    def views(self, flat: Tensor) -> list[Tensor]:
        """Parts of a flat tensor in the shapes of the live ones."""
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(one.shape) for part, one in zip(parts, self.live, strict=True)]

    def find(self, share: float) -> Tensor:
        """`share` of old minus new of this learner since its block began, in `found`."""
        new, old = self.views(self.found), self.views(self.start)
        for into, begun, live in zip(new, old, self.live, strict=True):
            torch.sub(begun, live, out=into)
        return self.found.mul_(share) if share else self.found.zero_()

    def take(self, found: Tensor, rate: float, mix: float) -> None:
        """Move by the mean of what was found; the learner goes on from there.

        With `mix` that much of its own weights stays.
        """
        self.optimizer.step(self.weights, found[: self.weights.numel()], rate)
        self.start = self.optimizer.start(self.weights)
        for live, start in zip(self.live, self.views(self.start), strict=True):
            if mix:
                live.lerp_(start, 1 - mix)
            else:
                live.copy_(start)


@dataclass(frozen=True)
class Fragment:
    """What is exchanged at one time, `offset` steps into each block."""

    flats: tuple[FlatWeights, ...]
    offset: int


class GlobalWeights:
    """All that learners agree on: parameters by fragments, and buffers with the last of them.

    `make` makes an outer optimizer for each flat tensor of parameters, `average` for buffers;
    `zeros` is called alike on all ranks of the exchange.
    """

    def __init__(
        self,
        parameters: Named,
        buffers: Named,
        make: Callable[[], OuterOptimizer],
        average: Callable[[], OuterOptimizer],
        *,
        offsets: Sequence[int],
        zeros: Zeros,
    ) -> None:
        cut = in_fragments(parameters, len(offsets))
        self.fragments = [
            Fragment(tuple(FlatWeights(same, make(), zeros) for same in by_type(named)), offset)
            for named, offset in zip(cut, offsets, strict=True)
        ]
        self.buffers = tuple(FlatWeights(same, average(), zeros) for same in by_type(buffers))
        self._parameters = [flat for one in self.fragments for flat in one.flats]

    @property
    def flats(self) -> list[FlatWeights]:
        """All of them."""
        return [*self._parameters, *self.buffers]

    def swap(self) -> None:
        """Live tensors and global weights change places; a second call puts them back."""
        with torch.no_grad():
            for flat in self.flats:
                for live, view in zip(flat.live, flat.views(flat.weights), strict=True):
                    own = live.clone()
                    live.copy_(view)
                    view.copy_(own)

    # --- state: what is loaded goes through the live tensors, in which a model is whole ----

    @property
    def has_momentum(self) -> bool:
        return any(flat.optimizer.momentum is not None for flat in self._parameters)

    @contextmanager
    def momentum_in_place(self) -> Iterator[None]:
        """Within, the live parameters are what the outer optimizers keep of them."""
        own = [[live.clone() for live in flat.live] for flat in self._parameters]
        with torch.no_grad():
            for flat in self._parameters:
                kept = flat.optimizer.momentum
                kept = torch.zeros_like(flat.weights) if kept is None else kept
                torch._foreach_copy_(flat.live, flat.views(kept))
            yield
            for flat, tensors in zip(self._parameters, own, strict=True):
                torch._foreach_copy_(flat.live, tensors)

    def take_momentum(self) -> None:
        """The live parameters are what the outer optimizers keep."""
        for flat in self._parameters:
            flat.optimizer.momentum = torch.cat([live.flatten() for live in flat.live])

    def begin_anew(self) -> None:
        """The live tensors are the global weights; learners begin a block where these say."""
        with torch.no_grad():
            for flat in self.flats:
                torch.cat([live.flatten() for live in flat.live], out=flat.weights)
                flat.start = flat.optimizer.start(flat.weights)
                torch._foreach_copy_(flat.live, flat.views(flat.start))

    def live(self) -> dict[str, Tensor]:
        """Copies of what this learner trains, by name."""
        return {n: t.clone() for f in self.flats for n, t in zip(f.names, f.live, strict=True)}

    def take_live(self, live: Mapping[str, Tensor]) -> bool:
        """Write what `live` returned back; whether it is of the same tensors."""
        own = {n: t for f in self.flats for n, t in zip(f.names, f.live, strict=True)}
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in live.items()}:
            return False
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(live[name])
        return True


def in_fragments(named: Named, count: int) -> list[Named]:
    """Runs of parameters in the order of the model, of about as many bytes each."""
    total, filled = sum(tensor.nbytes for _, tensor in named), 0
    found: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    for name, tensor in named:
        middle = filled + tensor.nbytes / 2
        found[min(count - 1, int(count * middle / max(total, 1)))].append((name, tensor))
        filled += tensor.nbytes
    return list(found)


def by_type(named: Named) -> list[Named]:
    """The same tensors, in a list for each type of number."""
    kinds = dict.fromkeys(reals(tensor).dtype for _, tensor in named)
    return [[(n, t) for n, t in named if reals(t).dtype == kind] for kind in kinds]


# --- learner state -------------------------------------------------------------------------------
# The state of one learner among others: plain tensors, whatever its ranks hold parts of.


def as_parts(state: Any) -> Any:
    """A state in which what this rank holds of a tensor stands for the tensor."""
    if isinstance(state, Tensor):
        return local(state)
    if isinstance(state, dict):
        return {name: as_parts(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(as_parts(value) for value in state)
    return state


def as_it_was(parts: Any, like: Any) -> Any:
    """What `as_parts` was given, of which `like` has the structure. No communication."""
    if isinstance(parts, Tensor):
        if not (isinstance(like, Tensor) and is_dtensor(like)):
            return parts
        placed: Any = like
        return load(DTENSORS).dtensor(parts, placed.device_mesh, placed.placements, placed)
    if isinstance(parts, dict):
        named = like if isinstance(like, dict) else {}
        return {name: as_it_was(value, named.get(name)) for name, value in parts.items()}
    if type(parts) in (list, tuple):
        is_alike = type(like) is type(parts) and len(like) == len(parts)
        others: Any = like if is_alike else [None] * len(parts)
        return type(parts)(as_it_was(*pair) for pair in zip(parts, others, strict=True))
    return parts
