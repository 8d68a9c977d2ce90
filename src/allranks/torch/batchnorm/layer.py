"""BatchNorm layers that belong to shards, of torch here, of Keras in `keras.shards`.

Each shard is normalised by its own moments, which are left in the scope: the running statistics
take one update per step, from the sample-weighted moments of all shards of all ranks
(`running_statistics`). A shard of one sample is normalised by the running statistics and adds
nothing to them. With `batchnorm = "whole"` the global batch is normalised instead (`whole_norm`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the public base of 1d, 2d and 3d

from allranks.errors import RequestError
from allranks.strategies.shards import Run
from allranks.torch.batchnorm import by_library
from allranks.torch.batchnorm.by_shard import normalised_runs
from allranks.torch.batchnorm.moments import is_alone
from allranks.torch.draws.keys import rows_per_sample
from allranks.torch.model.layers import Normalising, OfShard, full_type


class NormOfShard(OfShard):
    """A layer that is normalised; where it is compiled, its moments are `left` behind in it."""

    left: list[Tensor]


def normalised(layer: NormOfShard, input: Tensor, by: Normalising) -> Tensor:
    """`input`, (rows, channels, …), normalised shard by shard; leaves the moments in the scope.

    Those of a layer that keeps no running statistics are of no use to anybody, and not left there.
    """
    scope = layer.scope
    if input.shape[1] != by.features:  # one feature would go along all channels
        raise _other_channels(input, by)
    if scope.whole is not None:
        return scope.whole.normalised(scope, layer.index, input, by)
    per_sample = rows_per_sample(input.shape, scope.samples, "BatchNorm")
    runs = scope.runs if torch.compiler.is_compiling() else scope.lay_out()
    at = 0
    for run in runs:
        values = run.samples * per_sample * (input.numel() // (input.shape[0] * by.features))
        if values == 1 and not is_alone(run, by):
            raise no_variance(f"shard {scope.pieces[at].shard}")
        at += run.pieces
    if torch.compiler.is_compiling():
        output, found = normalised_runs(input, runs, per_sample, by)
        if by.running is not None:
            layer.left.append(found)  # not in the scope: a number of the layer would be guarded
        return output
    if len(scope.pieces) == 1:
        return _by_torch(layer, input, runs[0], by)
    both = None
    if by_library.takes(input):
        kind, shards = full_type(input.dtype), len(scope.pieces)
        both = scope.unweighted.room(shards, by.features, kind, input.device)
    output, found = normalised_runs(input, runs, per_sample, by, both)
    if by.running is None:
        return output
    if both is None:
        scope.add_moments(layer.index, found)
    else:
        lone = [(run.pieces, 0 if is_alone(run, by) else run.samples) for run in runs]
        samples = tuple(samples for pieces, samples in lone for _ in range(pieces))
        scope.leave_moments(layer.index, both, samples)
    return output


def _by_torch(layer: NormOfShard, input: Tensor, run: Run, by: Normalising) -> Tensor:
    """One shard alone: what a plain model computes, to the bit."""
    if is_alone(run, by):
        assert by.running is not None
        return F.batch_norm(input, *by.running, by.weight, by.bias, False, 0.0, by.eps)
    scope, kind = layer.scope, full_type(input.dtype)
    both = scope.unweighted.room(1, by.features, kind, input.device)
    mean, var = both[:, 0].unbind()
    output = F.batch_norm(input, mean, var, by.weight, by.bias, True, 1.0, by.eps)
    if by.running is None:
        return output
    if by.biased:
        values = input.numel() // by.features
        weight = mean.new_ones(1)
        found = torch.cat((weight, mean, var)).mul_(run.samples)
        found[1 + by.features :] *= (values - 1) / values
        scope.add_moments(layer.index, found)
    else:
        scope.leave_moments(layer.index, both, (run.samples,))
    return output


def _other_channels(input: Tensor, by: Normalising) -> RequestError:
    return RequestError(
        asked=f"BatchNorm over {by.features} channels",
        found=f"an input of shape {tuple(input.shape)}",
        why="channels are dimension 1, and each has statistics of its own",
        do=f"num_features={input.shape[1]}, or another layer before it",
    )


def no_variance(what: str) -> RequestError:
    """The refusal of a BatchNorm of one value per channel without running statistics."""
    return RequestError(
        asked="BatchNorm with track_running_stats=False",
        found=f"one value for each channel in {what}",
        why="one value has no variance, and no running statistics stand in for it",
        do="--set last_batch=drop, fewer shards, or running statistics in that layer",
    )


class ShardBatchNorm(NormOfShard, _BatchNorm):
    """BatchNorm over each shard by itself. Made from a BatchNorm layer by `swap_layers`."""

    def forward(self, input: Tensor) -> Tensor:
        scope = self.scope
        inside = scope.runs if torch.compiler.is_compiling() else scope.pieces
        if not (self.training and inside):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        running = None
        if self.track_running_stats:
            assert self.running_mean is not None and self.running_var is not None
            running = self.running_mean, self.running_var
        by = Normalising(self.num_features, running, self.weight, self.bias, self.eps)
        return normalised(self, input, by)

    def running_statistics(self) -> list[Tensor]:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        return [self.running_mean, self.running_var, self.num_batches_tracked]

    def running_rate(self) -> float | None:
        return self.momentum
