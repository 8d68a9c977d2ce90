"""Layers that belong to a shard: BatchNorm and dropout that do not know how many ranks there are.

The engine swaps them into the model in place (names, parameters and buffers stay). While a step is
in progress the `Scope` tells them which rows belong to which shard:

* BatchNorm normalises each shard by its own moments, and collects them; the running statistics
  take one update per step, from the sample-weighted moments of all shards of all ranks. A shard
  of one sample is normalised by the running statistics and adds nothing to them.
* Dropout draws its mask from a counter: (seed, step, shard, layer, call, element). An element is
  known by its coordinates in the sample, so padding changes nothing before it (`draws`).

Samples are expected along dimension 0; a layer may see several rows per sample (tokens). With
`batchnorm = "whole"` BatchNorm normalises over the global batch instead (`whole_norm`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the public base of 1d, 2d and 3d

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.strategies.shards import Micro
from allranks.torch.data.sources import seed_generators
from allranks.torch.draws.keys import Keys, rows_per_sample
from allranks.training.order import random_key


@dataclass(frozen=True)
class Moment:
    """A point in a forward pass: what goes through, and how often each layer has drawn."""

    step: int
    pieces: Micro
    samples: int
    calls: dict[int, int]


@dataclass
class Scope:
    """What is going through the model right now: the pieces of shards, in the order of the rows."""

    seed: int
    device: torch.device
    step: int = 0
    pieces: Micro = ()
    samples: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    moments: dict[int, Tensor] = field(default_factory=dict)
    whole: WholeNorm | None = None
    looked_up: dict[int, Tensor] = field(default_factory=dict)
    more_devices: tuple[torch.device, ...] = ()  # whose generators user code may draw from, too
    shortens: bool = True  # whether tables with a max_norm are written; not by passes beside a step

    def __post_init__(self) -> None:
        self.keys = Keys(self)

    def enter(self, step: int, pieces: Micro, samples: int) -> None:
        """A micro-batch of `samples` samples, made of `pieces`, goes through the model next.

        Python's, NumPy's and torch's generators are seeded for its first shard: randomness in user
        code is then the shard's own wherever a shard goes through the model alone (`--bitwise`).
        """
        self.step, self.pieces, self.samples = step, pieces, samples
        self.calls.clear()
        self.keys.draw_here()
        first = pieces[0]
        self._seed(random_key(self.seed, step, first.shard, first.start, -1))

    def key_stage(self, stage: int) -> None:
        """What user code draws next belongs to a stage of what goes through the model."""
        self.keys.draw_elsewhere()
        first = self.pieces[0]
        self._seed(random_key(self.seed, self.step, first.shard, first.start, -1, stage))

    def key(self, step: int, purpose: int) -> None:
        """What is drawn next is the same on every rank, whichever shard it was keyed for last."""
        self.keys.draw_elsewhere()
        self._seed(random_key(self.seed, step, -1, -1, purpose))

    def _seed(self, key: int) -> None:
        seed_generators(key)
        accelerator.seed(self.device, key)
        for device in self.more_devices:
            accelerator.seed(device, key ^ device.index)

    def leave(self) -> None:
        """No step is in progress: the layers behave as torch's own."""
        self.pieces = ()

    def moment(self) -> Moment:
        """What is going through the model right now, to come back to with `again`."""
        return Moment(self.step, self.pieces, self.samples, dict(self.calls))

    @contextmanager
    def again(self, moment: Moment) -> Iterator[None]:
        """Within, it is `moment`: the same is drawn as then, and nothing of it is counted."""
        now = self.step, self.pieces, self.samples, self.calls, self.moments
        self.step, self.pieces, self.samples = moment.step, moment.pieces, moment.samples
        self.calls, self.moments = dict(moment.calls), {}
        try:
            with self.keys.drawing():
                yield
        finally:
            self.step, self.pieces, self.samples, self.calls, self.moments = now

    def moments_of(self, index: int, input: Tensor, by: Normalising) -> Tensor:
        """Where a layer adds up (weight, weighted mean and variance) of the shards it has seen."""
        found = self.moments.get(index)
        if found is None:
            found = input.new_zeros(1 + 2 * by.features, dtype=full_type(input.dtype))
            if by.running is not None:
                self.moments[index] = found
        return found

    def take_moments(self, own: Scope) -> None:
        """Add what another scope has collected from a part of these samples, which then has none.

        All of it is on the device of this scope afterwards.
        """
        for layer, found in own.moments.items():
            moments, before = found.to(self.device), self.moments.get(layer)
            self.moments[layer] = moments if before is None else before.add_(moments)
        own.moments.clear()

    def rows(self, layer: str, tensor: Tensor) -> list[int]:
        """How many rows of `tensor` belong to each piece."""
        per_sample = rows_per_sample(tensor.shape, self.samples, layer)
        return [piece.samples * per_sample for piece in self.pieces]


class Swapped:
    """A layer while the engine holds the model; its own class is the second base."""


OF_SWAPPED = frozenset(
    {
        *("scope", "index", "shared_dims", "slot", "adds_no_loss", "part_of"),
        *("exchange", "region", "regions", "between", "dims", "sizes"),
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
        """The tensors that only the engine writes."""
        ...

    def update_running(self, moments: Tensor) -> None:
        """One update from `moments`: (weight, weighted mean and variance)."""
        ...


class WholeNorm(Protocol):
    """What normalises over the whole global batch in place of the shard (`whole_norm`)."""

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


def normalised(scope: Scope, index: int, input: Tensor, by: Normalising) -> Tensor:
    """`input`, (rows, channels, …), normalised shard by shard; leaves the moments in `scope`.

    Those of a layer that keeps no running statistics are of no use to anybody, and not left there.
    """
    if scope.whole is not None:
        return scope.whole.normalised(scope, index, input, by)
    moments = scope.moments_of(index, input, by)
    rows = scope.rows("BatchNorm", input)
    outputs = []
    for piece, part in zip(scope.pieces, input.split(rows), strict=True):
        if piece.shard_size == 1 and by.running is not None:
            outputs.append(F.batch_norm(part, *by.running, by.weight, by.bias, False, 0.0, by.eps))
            continue
        if part.numel() == by.features:
            raise no_variance(f"shard {piece.shard}")
        found = moments.new_zeros(2, by.features)  # (mean, unbiased variance)
        outputs.append(
            F.batch_norm(part, found[0], found[1], by.weight, by.bias, True, 1.0, by.eps)
        )
        if by.biased:  # in a new tensor: backward takes the other one
            values = part.numel() // by.features
            found = torch.stack((found[0], found[1] * ((values - 1) / values)))
        moments[0] += piece.samples
        moments[1:].add_(found.flatten(), alpha=piece.samples)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def no_variance(what: str) -> RequestError:
    """The refusal of a BatchNorm of one value per channel without running statistics."""
    return RequestError(
        asked="BatchNorm with track_running_stats=False",
        found=f"one value for each channel in {what}",
        why="one value has no variance, and no running statistics stand in for it",
        do="--set last_batch=drop, fewer shards, or running statistics in that layer",
    )


class ShardBatchNorm(OfShard, _BatchNorm):
    """BatchNorm over each shard by itself. Made from a BatchNorm layer by `swap_layers`."""

    def forward(self, input: Tensor) -> Tensor:
        scope = self.scope
        if not (self.training and scope.pieces):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        running = None
        if self.track_running_stats:
            assert self.running_mean is not None and self.running_var is not None
            running = self.running_mean, self.running_var
        by = Normalising(self.num_features, running, self.weight, self.bias, self.eps)
        return normalised(scope, self.index, input, by)

    def running_statistics(self) -> list[Tensor]:
        return list(self.buffers())

    @torch.no_grad()
    def update_running(self, moments: Tensor) -> None:
        """One update of the running statistics from `moments`: (weight, weighted mean and var)."""
        weight = float(moments[0])
        if not weight or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        rate = self.momentum
        if rate is None:
            rate = 1.0 / float(self.num_batches_tracked)
        mean, var = (moments[1:] / weight).view(2, self.num_features)
        self.running_mean.lerp_(mean.to(self.running_mean), rate)
        self.running_var.lerp_(var.to(self.running_var), rate)


def full_type(kind: torch.dtype) -> torch.dtype:
    """The type for statistics over what is of this type: 16 bits would not hold them."""
    return torch.promote_types(kind, torch.float32)


def own_kind(module: nn.Module) -> type:
    """The class of a layer as its owner made it, whether it is swapped or not."""
    kind = type(module)
    while issubclass(kind, Swapped):
        kind = kind.__bases__[1]
    return kind


def is_chain(module: nn.Module) -> bool:
    """Whether a module calls its members in a row, and does nothing else."""
    kind = own_kind(module)
    if not issubclass(kind, nn.Sequential) or "forward" in vars(module) or has_hooks(module):
        return False
    plain = nn.Sequential
    return kind.forward is plain.forward and kind.__iter__ is plain.__iter__


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out, or changes it."""
    return any(getattr(module, name, None) for name in HOOKS)


def every_layer(model: nn.Module) -> Iterator[nn.Module]:
    """Every module of a model once, with the layers that Keras keeps out of torch's sight."""
    seen: set[int] = set()
    for module in model.modules():
        below: Any = getattr(module, "_flatten_layers", tuple)
        for layer in (module, *below()):
            if id(layer) not in seen:
                seen.add(id(layer))
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
