"""Layers that belong to a shard: BatchNorm and dropout that do not know how many ranks there are.

The engine swaps them into the model in place (names, parameters and buffers stay). While a step is
in progress the `Scope` tells them which rows belong to which shard:

* BatchNorm normalises each shard by its own moments, and collects them; the running statistics
  take one update per step, from the sample-weighted moments of all shards of all ranks. A shard
  of one sample is normalised by the running statistics and adds nothing to them.
* Dropout draws its mask from a counter: (seed, step, shard, layer, call).

Samples are expected along dimension 0; a layer may see several rows per sample (tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the public base of 1d, 2d and 3d

from allranks.errors import RequestError
from allranks.order import random_key
from allranks.shards import Micro

DROPOUTS: dict[type[nn.Module], int] = {
    nn.Dropout: 0,  # dimensions after (sample, channel) that share one draw
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}


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

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device)

    def enter(self, step: int, pieces: Micro, samples: int) -> None:
        """A micro-batch of `samples` samples, made of `pieces`, goes through the model next.

        The framework's own generator is seeded for its first shard: randomness in user code is
        then the shard's own wherever a shard goes through the model alone (`--bitwise`).
        """
        self.step, self.pieces, self.samples = step, pieces, samples
        self.calls.clear()
        first = pieces[0]
        key = random_key(self.seed, step, first.shard, first.start, -1)
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)

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
            yield
        finally:
            self.step, self.pieces, self.samples, self.calls, self.moments = now

    def rows(self, layer: str, tensor: Tensor) -> list[int]:
        """How many rows of `tensor` belong to each piece."""
        per_sample, rest = divmod(tensor.shape[0], self.samples)
        if rest or not per_sample:
            raise RequestError(
                asked=f"{layer} on a tensor of shape {tuple(tensor.shape)}",
                found=f"{tensor.shape[0]} rows for {self.samples} samples",
                why="rows are given to shards, so dimension 0 must run over the samples",
                do="put the samples first (batch_first=True) before this layer",
            )
        return [piece.samples * per_sample for piece in self.pieces]


class ShardBatchNorm(_BatchNorm):
    """BatchNorm over each shard by itself. Made from a BatchNorm layer by `swap_layers`."""

    scope: Scope
    index: int

    def forward(self, input: Tensor) -> Tensor:
        scope = self.scope
        if not (self.training and scope.pieces):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        moments = scope.moments.get(self.index)
        if moments is None:
            moments = input.new_zeros(1 + 2 * self.num_features, dtype=_full(input.dtype))
            scope.moments[self.index] = moments
        rows = scope.rows("BatchNorm", input)
        outputs = []
        for piece, part in zip(scope.pieces, input.split(rows), strict=True):
            if piece.shard_size == 1 and self.track_running_stats:
                mean, var = self.running_mean, self.running_var
                outputs.append(
                    F.batch_norm(part, mean, var, self.weight, self.bias, False, 0.0, self.eps)
                )
                continue
            found = moments.new_zeros(2, self.num_features)  # (mean, unbiased variance)
            outputs.append(
                F.batch_norm(part, found[0], found[1], self.weight, self.bias, True, 1.0, self.eps)
            )
            moments[0] += piece.samples
            moments[1:].add_(found.flatten(), alpha=piece.samples)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

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
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(var.to(self.running_var.dtype), rate)


def _full(kind: torch.dtype) -> torch.dtype:
    """The type for statistics over what is of this type: 16 bits would not hold them."""
    return torch.promote_types(kind, torch.float32)


class ShardDropout(nn.Module):
    """Dropout whose mask belongs to the shard. Made from a dropout layer by `swap_layers`."""

    scope: Scope
    index: int
    shared_dims: int
    p: float

    def forward(self, input: Tensor) -> Tensor:
        scope = self.scope
        if not (self.training and scope.pieces):
            return super().forward(input)  # type: ignore[no-any-return]
        if self.p == 0:
            return input
        call = scope.calls.get(self.index, 0)
        scope.calls[self.index] = call + 1
        rows = scope.rows("Dropout", input)
        shape = list(input.shape)
        for dim in range(len(shape) - self.shared_dims, len(shape)):
            shape[dim] = 1
        draws = torch.empty(shape, device=input.device)
        for piece, count, part in zip(scope.pieces, rows, draws.split(rows), strict=True):
            key = random_key(scope.seed, scope.step, piece.shard, self.index, call)
            scope.generator.manual_seed(key)
            if piece.samples == piece.shard_size:
                part.uniform_(generator=scope.generator)
            else:  # part of a shard: draw for the whole shard, take the rows of this piece
                per_sample = count // piece.samples
                whole = torch.empty((piece.shard_size * per_sample, *shape[1:]), device=part.device)
                whole.uniform_(generator=scope.generator)
                part.copy_(whole[piece.start * per_sample : piece.stop * per_sample])
        keep = draws.ge(self.p).to(input.dtype)
        return input * keep.div_(1 - self.p) if self.p < 1 else input * keep


def swap_layers(model: nn.Module, scope: Scope) -> dict[str, list[str]]:
    """Swap the layers of `model` in place. Returns the names swapped, and those that cannot be.

    `user_randomness` names layers that draw from the framework's own generator: with them the
    result is equal on any number of ranks only where each shard runs alone.
    """
    names: dict[str, list[str]] = {"batchnorm": [], "dropout": [], "user_randomness": []}
    for index, (name, module) in enumerate(model.named_modules()):
        kind = type(module)
        if isinstance(module, (ShardBatchNorm, ShardDropout)):  # swapped before, by another trainer
            kind = kind.__bases__[1]
        if isinstance(module, (nn.SyncBatchNorm, nn.modules.lazy.LazyModuleMixin)):
            raise RequestError(
                asked=f"to train a model with {kind.__name__} at {name!r}",
                found=f"{kind.__name__}",
                why="it communicates or makes its weights inside forward, out of the engine's sight",
                do="use the plain layer, with its sizes given",
            )
        if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = type(f"Shard{kind.__name__}", (ShardBatchNorm, kind), {})
            names["batchnorm"].append(name)
        elif kind in DROPOUTS:
            module.__class__ = type(f"Shard{kind.__name__}", (ShardDropout, kind), {})
            module.shared_dims = DROPOUTS[kind]
            names["dropout"].append(name)
        elif isinstance(module, _BatchNorm) or (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        ):
            raise RequestError(
                asked=f"to train a model with {kind.__name__} at {name!r}",
                found=f"{kind.__module__}.{kind.__qualname__}",
                why="it updates its statistics inside forward, so each rank would have its own",
                do="use nn.BatchNorm1d, 2d or 3d itself, or a norm without running statistics",
            )
        else:
            drawn = getattr(module, "dropout", 0)
            if (isinstance(drawn, float) and drawn > 0) or isinstance(
                module, (nn.RReLU, nn.modules.dropout._DropoutNd)
            ):
                names["user_randomness"].append(name)
            continue
        module.scope, module.index = scope, index
    return names


def restore_layers(model: nn.Module) -> None:
    """Undo `swap_layers`: the model is the user's own again, and can be pickled."""
    for module in model.modules():
        if isinstance(module, (ShardBatchNorm, ShardDropout)):
            module.__class__ = type(module).__bases__[1]
            del module.scope, module.index


def shard_norms(model: nn.Module) -> list[ShardBatchNorm]:
    """The swapped BatchNorm layers that keep running statistics, in the order of the model."""
    layers = (m for m in model.modules() if isinstance(m, ShardBatchNorm))
    return [layer for layer in layers if layer.track_running_stats]


def computed_again() -> RequestError:
    """What to say where a layer of a shard ran once more, in backward, and nobody told its scope."""
    return RequestError(
        asked="activation checkpointing around BatchNorm or dropout",
        found="such a layer ran again during backward",
        why="it would draw another mask, and count its moments twice",
        do="leave these layers outside of the checkpointed part",
    )
