"""Layers that belong to a shard: BatchNorm and dropout that do not know how many ranks there are.

The engine swaps them into the model in place (names, parameters and buffers stay). While a step is
in progress the `Scope` tells them which rows belong to which shard:

* BatchNorm normalises each shard by its own moments, and collects them; the running statistics
  take one update per step, from the sample-weighted moments of all shards of all ranks. A shard
  of one sample is normalised by the running statistics and adds nothing to them.
* Dropout draws its mask from a counter: (seed, step, shard, layer, call, element). An element is
  known by its coordinates in the sample, so padding changes nothing before it (`draws`).

Samples are expected along dimension 0; a layer may see several rows per sample (tokens). With
`batchnorm = "whole"` BatchNorm normalises over the global batch instead (`across_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.strategies.shards import Micro, Runs, runs_of
from allranks.torch.random.keyed_rng import Keys, rows_per_sample, seed_generators
from allranks.training.order import random_key


@dataclass(frozen=True)
class Moment:
    """A point in a forward pass: what goes through, and how often each layer has drawn."""

    step: int
    pieces: Micro
    samples: int
    calls: dict[int, int]


class UnweightedMoments:
    """Moments of shards that layers have stored, to be weighted for all layers at once.

    `room` gives a layer its part of a buffer for all layers, which is zeroed at once. The buffer is
    as large as the last pass with as many shards needed.
    """

    def __init__(self) -> None:
        self._stored: dict[int, Tensor] = {}
        self._samples: tuple[int, ...] = ()
        self._sizes: dict[int, int] = {}
        self._buffer: Tensor | None = None
        self._end = 0

    def room(self, shards: int, features: int, kind: torch.dtype, on: torch.device) -> Tensor:
        """Zeros, (2, shards, features), for mean and variance of each shard."""
        start, size = self._end, 2 * shards * features
        buffer = self._buffer
        is_of_it = buffer is not None and (buffer.dtype, buffer.device) == (kind, on)
        if buffer is None or not is_of_it or start + size > len(buffer):
            start, known = 0, self._sizes.get(shards, 0)
            self._buffer = buffer = torch.zeros(max(size, known), dtype=kind, device=on)
        self._end = start + size
        return buffer[start : self._end].view(2, shards, features)

    def add(self, layer: int, both: Tensor, samples: tuple[int, ...]) -> bool:
        """Store those of a layer; returns false if the others must be taken first."""
        first = next(iter(self._stored.values()), both)
        is_alike = (first.dtype, first.device) == (both.dtype, both.device)
        if layer in self._stored or not is_alike or (self._stored and samples != self._samples):
            return False
        self._stored[layer], self._samples = both, samples
        return True

    def order(self, layers: list[int]) -> bool:
        """Whether exactly these layers have stored some; sorts them in this order."""
        if len(layers) != len(self._stored) or any(n not in self._stored for n in layers):
            return False
        self._stored = {layer: self._stored[layer] for layer in layers}
        return True

    def weighted(self) -> Tensor:
        """(weight, weighted mean and variance) of each layer in a row; removes all of them."""
        moments, samples = list(self._stored.values()), self._samples
        self.clear()
        shards = len(samples)
        self._sizes[shards] = sum(both.numel() for both in moments)
        ones = _ones(shards, moments[0].dtype, moments[0].device)
        each = torch.cat([part for both in moments for part in (ones, *both)], 1)
        if len(set(samples)) == 1:
            return (each[0] if shards == 1 else each.sum(0)).mul_(samples[0])
        weights = _weights(samples, each.dtype, each.device)
        return each.mul_(weights).sum(0)

    def take(self) -> Iterable[tuple[int, Tensor]]:
        """Those of each layer; removes all of them."""
        if not self._stored:
            return ()
        layers = list(self._stored)
        sizes = [1 + 2 * both.shape[2] for both in self._stored.values()]
        return zip(layers, self.weighted().split(sizes), strict=True)

    def clear(self) -> None:
        self._stored.clear()
        self._buffer, self._end = None, 0


@lru_cache(maxsize=64)
def _ones(shards: int, kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((shards, 1), dtype=kind).to(device)


@lru_cache(maxsize=256)
def _weights(samples: tuple[int, ...], kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(samples, dtype=kind).view(-1, 1).to(device)


@dataclass
class Scope:
    """The current forward pass: its pieces of shards, in the order of the rows."""

    seed: int
    device: torch.device
    step: int = 0
    pieces: Micro = ()
    samples: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    whole: WholeNorm | None = None
    looked_up: dict[int, Tensor] = field(default_factory=dict)
    more_devices: tuple[torch.device, ...] = ()  # whose generators user code may draw from, too
    served: frozenset[int] = frozenset()  # the ids of tables that lie on parameter servers
    shortens: bool = True  # whether tables with a max_norm are written; not outside of a step

    def __post_init__(self) -> None:
        self.keys = Keys(self)
        self.unweighted = UnweightedMoments()
        self._moments: dict[int, Tensor] = {}
        self.runs: Runs = ()
        self._laid_out: Micro = ()
        self.by_compiler = False  # whether this pass goes through what a compiler made of blocks
        self._has_generator = accelerator.is_accelerator(self.device)

    def enter(self, step: int, pieces: Micro, samples: int, stage: int = 0) -> None:
        """A micro-batch of `samples` samples, made of `pieces`, goes through the model next.

        Python's, NumPy's and torch's generators are seeded for its first shard: randomness in user
        code is then the shard's own wherever a shard goes through the model alone (`--bitwise`).
        Of a pipeline they are seeded for the `stage` that it goes through, too.
        """
        self.step, self.pieces, self.samples = step, pieces, samples
        self.by_compiler = False
        self.calls.clear()
        if stage:
            self.key_stage(stage)
            return
        self.keys.draw_here()
        first = pieces[0]
        self._seed(random_key(self.seed, step, first.shard, first.start, -1))

    def lay_out(self) -> Runs:
        """Set and return the runs of the current pieces; compiled code reads only `runs`."""
        if self._laid_out is not self.pieces:
            self._laid_out, self.runs = self.pieces, runs_of(self.pieces)
        return self.runs

    def key_stage(self, stage: int) -> None:
        """Seed the generators of user code for a stage of the current pass."""
        self.keys.draw_elsewhere()
        first = self.pieces[0]
        self._seed(random_key(self.seed, self.step, first.shard, first.start, -1, stage))

    def key(self, step: int, purpose: int) -> None:
        """Key the next draws for no shard: they are the same on every rank."""
        self.keys.draw_elsewhere()
        self._seed(random_key(self.seed, step, -1, -1, purpose))

    def _seed(self, key: int) -> None:
        seed_generators(key)
        self.keys.seed_of_torch = key
        if self._has_generator:
            accelerator.seed(self.device, key)
        for device in self.more_devices:
            accelerator.seed(device, key ^ device.index)

    def leave(self) -> None:
        """No step is in progress: the layers behave as torch's own."""
        self.pieces, self.by_compiler = (), False

    def moment(self) -> Moment:
        """The current pass, which `again` can restore."""
        return Moment(self.step, self.pieces, self.samples, dict(self.calls))

    @contextmanager
    def again(self, moment: Moment) -> Iterator[None]:
        """Within, the pass is `moment`: draws are the same as then, and nothing is counted."""
        now = self.step, self.pieces, self.samples, self.calls, self.moments
        self.step, self.pieces, self.samples = moment.step, moment.pieces, moment.samples
        self.calls, self.moments = dict(moment.calls), {}
        try:
            with self.keys.drawing():
                yield
        finally:
            self.step, self.pieces, self.samples, self.calls, self.moments = now

    @property
    def moments(self) -> dict[int, Tensor]:
        """The moments of each layer: (weight, weighted mean and variance)."""
        for layer, moments in self.unweighted.take():
            self._add(layer, moments)
        return self._moments

    @moments.setter
    def moments(self, moments: dict[int, Tensor]) -> None:
        self.unweighted.clear()
        self._moments = moments

    def leave_moments(self, layer: int, both: Tensor, samples: tuple[int, ...]) -> None:
        """Store a layer's mean and variance of each shard of so many samples. They are weighted
        together with those of other layers when they are read."""
        if not self.unweighted.add(layer, both, samples):
            self._moments = self.moments
            self.unweighted.add(layer, both, samples)

    def moments_of_all(self, layers: list[int]) -> Tensor | None:
        """Those of exactly these layers, in this order; removes them."""
        if self._moments or not self.unweighted.order(layers):
            return None
        return self.unweighted.weighted()

    def add_moments(self, layer: int, moments: Tensor) -> None:
        """Add a layer's (weight, weighted mean and variance); the tensor is reused."""
        self._moments = self.moments
        self._add(layer, moments)

    def _add(self, layer: int, moments: Tensor) -> None:
        before = self._moments.get(layer)
        self._moments[layer] = moments if before is None else before.add_(moments)

    def merge_moments(self, part: Scope) -> None:
        """Move the moments of another scope, of a part of these samples, to this one.

        All of them are on the device of this scope afterwards.
        """
        for layer, moments in part.moments.items():
            self.add_moments(layer, moments.to(self.device))
        part.moments.clear()

    def rows(self, layer: str, tensor: Tensor) -> list[int]:
        """How many rows of `tensor` belong to each piece."""
        per_sample = rows_per_sample(tensor.shape, self.samples, layer)
        return [piece.samples * per_sample for piece in self.pieces]


class Swapped:
    """A layer while the engine holds the model; its own class is the second base."""


OF_SWAPPED = frozenset(
    {
        *("moments", "scope", "index", "shared_dims", "slot", "adds_no_loss", "part_of"),
        *("exchange", "region", "regions", "between", "dims", "sizes", "lengths"),
    }
)
"""What swapped layers carry beside what their owner gave them."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""What somebody beside its class may let a module call."""


class OfShard(Swapped):
    """A layer that follows the scope; `index` is its number in the model."""

    scope: Scope
    index: int


class ShardNorm(Protocol):
    """A swapped layer with running statistics: what the tally must know of it."""

    index: int

    @property
    def num_features(self) -> int: ...

    def running_statistics(self) -> list[Tensor]:
        """The tensors that only the engine writes: mean, variance, perhaps the count of updates."""
        ...

    def running_rate(self) -> float | None:
        """How far an update goes to the new statistics; `None` for the mean of all updates."""
        ...


class WholeNorm(Protocol):
    """What normalises over the whole global batch in place of the shard (`batchnorm`)."""

    def begin(self, own_samples: int) -> None: ...

    def alone(self) -> AbstractContextManager[None]: ...

    def normalised(self, scope: Scope, index: int, input: Tensor, by: Normalising) -> Tensor: ...


@dataclass(frozen=True)
class Normalising:
    """What a BatchNorm does to its channels; `running` are its statistics, if it keeps any.

    Torch keeps the unbiased variance, Keras the `biased` one.
    """

    features: int
    running: tuple[Tensor, Tensor] | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    biased: bool = False


def full_type(kind: torch.dtype) -> torch.dtype:
    """The type for statistics over numbers of this type: 16 bits are too few."""
    return torch.promote_types(kind, torch.float32)


def swapped_kind(layer: Any, kind: Any) -> Any:
    """The class of a layer of `kind` while it is swapped: one for all, so that one graph fits."""
    return _swapped_kind(layer, kind)


@cache
def _swapped_kind(layer: Any, kind: Any) -> Any:
    return type(f"Shard{kind.__name__}", (layer, kind), {})


def own_kind(module: nn.Module) -> type:
    """The original class of a layer, whether it is swapped or not."""
    kind = type(module)
    while issubclass(kind, Swapped):
        kind = kind.__bases__[1]
    return kind


def is_chain(module: nn.Module) -> bool:
    """Whether a module only calls its members one after the other."""
    kind = own_kind(module)
    if not issubclass(kind, nn.Sequential) or "forward" in vars(module) or has_hooks(module):
        return False
    plain = nn.Sequential
    return kind.forward is plain.forward and kind.__iter__ is plain.__iter__


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its inputs or outputs."""
    return any(getattr(module, name, None) for name in HOOKS)


def every_layer(model: nn.Module) -> Iterator[nn.Module]:
    """Every module of a model once, with the layers that Keras keeps out of torch's sight."""
    visited: set[int] = set()
    for module in model.modules():
        below: Any = getattr(module, "_flatten_layers", tuple)
        for layer in (module, *below()):
            if id(layer) not in visited:
                visited.add(id(layer))
                yield layer


def shard_norms(model: nn.Module) -> list[ShardNorm]:
    """The swapped BatchNorm layers that keep running statistics, in the order of the model."""
    layers: list[Any] = [layer for layer in every_layer(model) if isinstance(layer, OfShard)]
    return [layer for layer in layers if getattr(layer, "track_running_stats", False)]


def normalising_layers(model: nn.Module) -> list[nn.Module]:
    """The swapped BatchNorm layers, with or without running statistics."""
    return [m for m in every_layer(model) if isinstance(m, OfShard) and hasattr(m, "num_features")]


def computed_again() -> RequestError:
    """The refusal of a keyed layer that backward runs again, unknown to its scope."""
    return RequestError(
        asked="activation checkpointing around BatchNorm, dropout or a function that draws",
        found="such a layer ran again during backward",
        why="it would draw another mask, and count its moments twice",
        do="leave these outside of the checkpointed part, or --activation-checkpointing",
    )
