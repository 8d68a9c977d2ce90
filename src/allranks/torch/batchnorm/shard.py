"""BatchNorm of many shards in one pass: each is normalised by its own moments.

Shards of one size lie next to each other, so the rows of such a run are a view with the shards as
a dimension of their own, and every kernel runs once for all of them:

    forward    mean, var over (samples, positions) of each (shard, channel)
               output = input * scale + shift, where scale = weight / sqrt(var + eps)
    backward   dx = scale * (dy - mean(dy) - (x - mean) * mean(dy * (x - mean)) / (var + eps))

On a CPU, and for one thread, a loop in C does this for a run (`in_c`), and on some devices kernels
of torch do (`by_library`); else operations of torch do.
Sizes of shards differ by at most one: a micro-batch has three runs at most, if some have one sample
only. All write into slices of one output. Nothing is read on the host. Compilers, second
derivatives and transforms of `torch.func` get an expression of tensors (`moments`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the public base of 1d, 2d and 3d

from allranks.errors import RequestError
from allranks.strategies.shards import Runs, ShardRun
from allranks.torch.batchnorm import by_library, in_c
from allranks.torch.batchnorm.moments import (
    along,
    expression,
    is_alone,
    joined,
    running_moments,
    summed,
    weighted_moments,
)
from allranks.torch.model.layers import Normalising, OfShard, ShardNorm, full_type
from allranks.torch.random.keyed_rng import rows_per_sample

MEAN_THEN_SQUARES = {"cpu"}
"""The devices on which a mean, and then the squares around it, take a tenth of Welford's time."""


def normalised_runs(
    input: Tensor, runs: Runs, per_sample: int, by: Normalising, both: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`input`, (rows, channels, …), normalised; and (weight, weighted mean and variance).

    `per_sample` rows belong to each sample. The moments are the sums over the shards that have
    some, weighted by their samples, and have no gradient. Where `by_library` takes the input they
    are those of each shard in `both` instead, zeros of (2, shards, channels) before.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return expression(input, runs, per_sample, by)
    apply: Any = _ByShard.apply  # a copy inside of it would have no second derivative
    output: tuple[Tensor, Tensor] = apply(
        _dense(input), by.weight, by.bias, runs, per_sample, by, both
    )
    return output


class _ByShard(torch.autograd.Function):
    """The same with few passes over memory, and a backward pass of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        runs: Runs,
        per_sample: int,
        by: Normalising,
        both: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(input)
        saved: list[Tensor] = []
        # of each run: how many tensors it keeps, and the kernel that torch took
        kinds: list[tuple[int, int | None]] = []
        moments = []
        shard = 0
        for run, rows, source, target in _split(runs, per_sample, input, output):
            first, shard = shard, shard + run.pieces
            if both is not None and not is_alone(run, by):
                place = both[:, first:shard]
                of_run = (input[rows], source, by, target, output[rows], place)
                more, kernel = by_library.normalise(*of_run)
                saved += more
                kinds.append((len(more), kernel))
                continue
            result, inverse = _normalise(run, source, by, target)
            if not is_alone(run, by):
                values = source.shape[1] * source.shape[3]
                moments.append(weighted_moments(run, values, result, by))
            saved += result[0], inverse
            kinds.append((2, None))
        ctx.layout, ctx.by, ctx.kinds = (runs, per_sample), by, kinds
        ctx.save_for_backward(input, weight, bias, *saved)
        result = saved[0] if both is not None else joined(moments, by, saved[0])
        ctx.mark_non_differentiable(result)
        ctx.set_materialize_grads(False)
        return output, result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        above = gradients[0]
        if above is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, above), None, None, None, None)
        input, weight, bias, *saved = ctx.saved_tensors
        above = _dense(above, _format(input))
        of_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        targets = above if of_input is None else of_input  # not written then
        at, sums = 0, []
        split = _split(*ctx.layout, input, above, targets)
        for (run, rows, source, gradient, target), (count, kernel) in zip(
            split, ctx.kinds, strict=True
        ):
            of_run, at = saved[at : at + count], at + count
            to = None if of_input is None else target
            if kernel is None:
                mean, inverse = of_run
                sums.append(_derive(run, source, gradient, weight, mean, inverse, ctx.by, to))
                continue
            whole = (input[rows], above[rows], targets[rows])
            views = (source, gradient, to)
            sums.append(by_library.derive(*whole, *views, weight, ctx.by.eps, of_run, kernel))
        of_weight, of_bias = summed(sums)
        return (
            of_input,
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            *(None, None, None, None),
        )


def _normalise(
    run: ShardRun, source: Tensor, by: Normalising, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `target`; mean and variance of each (shard, channel), and 1 / sqrt(var + eps)."""
    alone = is_alone(run, by)
    library = None if alone else in_c.library_for(source, target, by.weight, by.bias)
    if library is not None:
        return in_c.normalise(library, source, by, target)
    if alone:
        both = running_moments(by, full_type(source.dtype), source.ndim)
    else:
        both = _statistics(source, target)
    mean, var = both.unbind()
    inverse = (var + by.eps).rsqrt_()
    _affine(source, mean, inverse, by, target)
    return both, inverse


def _statistics(source: Tensor, target: Tensor) -> Tensor:
    """Mean and variance of each (shard, channel) of a run; `target` is written over."""
    kind = full_type(source.dtype)
    if source.device.type not in MEAN_THEN_SQUARES:
        var, mean = torch.var_mean(source.to(kind), (1, 3), correction=0, keepdim=True)
        return torch.stack((mean, var))
    both = source.new_empty(2, source.shape[0], 1, source.shape[2], 1, dtype=kind)
    mean, var = both.unbind()
    torch.mean(source, (1, 3), keepdim=True, dtype=kind, out=mean)
    around = torch.sub(source, mean, out=target) if target.dtype == kind else source - mean
    torch.mean(around.square_(), (1, 3), keepdim=True, out=var)
    return both


def _derive(
    run: ShardRun,
    source: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    by: Normalising,
    target: Tensor | None,
) -> Tensor:
    """Fill `target`, if any, with the gradient of `source`; returns those of weight and bias."""
    library = None
    if not is_alone(run, by):
        library = in_c.library_for(source, gradient, weight, mean, inverse)
    if library is not None:
        return in_c.derive(library, gradient, source, weight, mean, inverse, target)
    around = source - mean
    buffer = target if target is not None and target.dtype == mean.dtype else None
    product = torch.mul(gradient, around, out=buffer)
    means = mean.new_empty(2, len(source), 1, source.shape[2], 1)
    along_it, plain = means.unbind()
    torch.mean(product, (1, 3), keepdim=True, out=along_it).mul_(inverse)
    torch.mean(gradient, (1, 3), keepdim=True, dtype=mean.dtype, out=plain)
    sums = means.sum((1, 2, 4)).mul_(source.shape[1] * source.shape[3])
    if target is None:
        return sums
    scale = inverse if weight is None else inverse * along(weight, source)
    torch.mul(gradient, scale, out=product)
    if not is_alone(run, by):
        means.mul_(scale)
        along_it.mul_(inverse)
        product.sub_(around.mul_(along_it).add_(plain))
    if buffer is None:
        target.copy_(product)
    return sums


def _affine(source: Tensor, mean: Tensor, inverse: Tensor, by: Normalising, target: Tensor) -> None:
    """`target` = (source - mean) * inverse * weight + bias, which is one scale and one shift."""
    scale = inverse if by.weight is None else inverse * along(by.weight, source)
    if by.bias is None:
        shift = (mean * scale).neg_()
    else:
        shift = torch.addcmul(along(by.bias, source), mean, scale, value=-1)
    if target.dtype == scale.dtype:
        torch.mul(source, scale, out=target).add_(shift)
    else:
        target.copy_((source * scale).add_(shift))


def _differentiable(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients as functions of what they came from, for a second derivative."""
    inputs = ctx.saved_tensors[:3]
    needs = ctx.needs_input_grad[:3]
    by = replace(ctx.by, weight=inputs[1], bias=inputs[2])
    runs, per_sample = ctx.layout
    output, _ = expression(inputs[0], runs, per_sample, by)
    wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if need]
    derivatives = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return tuple(next(derivatives) if need else None for need in needs)


def _split(runs: Runs, per_sample: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each run, its rows, and what it is of each tensor: (shards, samples, channels, positions).

    Where channels come last in memory: (shards, samples and positions, channels, 1).
    """
    at = 0
    last = not tensors[0].is_contiguous()
    for run in runs:
        rows = run.samples * per_sample
        end = at + run.pieces * rows
        parts = tensors if rows * run.pieces == len(tensors[0]) else [t[at:end] for t in tensors]
        where = slice(at, end)
        if last:
            yield run, where, *(t.movedim(1, -1).view(run.pieces, -1, t.shape[1], 1) for t in parts)
        else:
            yield run, where, *(t.view(run.pieces, rows, t.shape[1], -1) for t in parts)
        at = end


def _format(tensor: Tensor) -> torch.memory_format:
    """How the numbers of a tensor lie in memory, if they lie densely; else how they should."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _dense(tensor: Tensor, format: torch.memory_format | None = None) -> Tensor:
    return tensor.contiguous(memory_format=format or _format(tensor))


# --- layer ---------------------------------------------------------------------------------------
# BatchNorm layers that belong to shards, of torch here, of Keras in `keras.shards`.
#
# Each shard is normalised by its own moments, which are added to the scope: the running statistics
# take one update per step, from the sample-weighted moments of all shards of all ranks (below). A
# shard of one sample is normalised by the running statistics and adds nothing to them. With
# `batchnorm = "whole"` the global batch is normalised instead (`across_ranks`).


class NormOfShard(OfShard):
    """A normalisation layer; if it is compiled, it stores its `moments`."""

    moments: list[Tensor]


def normalised(layer: NormOfShard, input: Tensor, by: Normalising) -> Tensor:
    """`input`, (rows, channels, …), normalised shard by shard; leaves the moments in the scope.

    A layer without running statistics leaves no moments.
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
        output, moments = normalised_runs(input, runs, per_sample, by)
        if by.running is not None:
            layer.moments.append(moments)  # not in the scope: the layer's number would be guarded
        return output
    if len(scope.pieces) == 1:
        return _by_torch(layer, input, runs[0], by)
    both = None
    if by_library.takes(input):
        kind, shards = full_type(input.dtype), len(scope.pieces)
        both = scope.unweighted.room(shards, by.features, kind, input.device)
    output, moments = normalised_runs(input, runs, per_sample, by, both)
    if by.running is None:
        return output
    if both is None:
        scope.add_moments(layer.index, moments)
    else:
        lone = [(run.pieces, 0 if is_alone(run, by) else run.samples) for run in runs]
        samples = tuple(samples for pieces, samples in lone for _ in range(pieces))
        scope.leave_moments(layer.index, both, samples)
    return output


def _by_torch(layer: NormOfShard, input: Tensor, run: ShardRun, by: Normalising) -> Tensor:
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
        moments = torch.cat((weight, mean, var)).mul_(run.samples)
        moments[1 + by.features :] *= (values - 1) / values
        scope.add_moments(layer.index, moments)
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


def no_variance(where: str) -> RequestError:
    """The refusal of a BatchNorm of one value per channel without running statistics."""
    return RequestError(
        asked="BatchNorm with track_running_stats=False",
        found=f"one value for each channel in {where}",
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


# --- running statistics --------------------------------------------------------------------------
# The running statistics of all BatchNorm layers, updated at once from the moments of a step.
#
# `moments` are those of all layers, one after the other: weight, weighted mean, weighted variance.
# Nothing is read on the host. A layer that no shard had moments for keeps what it has. No
# communication: every rank has the same sums.


class RunningStatistics:
    """Those of `norms`, whose moments are stored in this order on the device of `like`."""

    def __init__(self, norms: Sequence[ShardNorm], like: Tensor) -> None:
        self.norms, self.like = norms, like
        self.sizes = [n for norm in norms for n in (1, norm.num_features, norm.num_features)]
        sizes = torch.tensor([1 + 2 * norm.num_features for norm in norms], dtype=torch.long)
        self.layer = torch.arange(len(norms)).repeat_interleave(sizes).to(like.device)
        self.weights = (sizes.cumsum(0) - sizes).to(like.device)
        self._rates_then: list[float | None] = []

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """One update of all layers that any shard was normalised by in this step."""
        if not self.norms:
            return
        weights = moments[self.weights]
        had_some = weights > 0
        statistics = [norm.running_statistics() for norm in self.norms]
        counted = [number for number, tensors in enumerate(statistics) if len(tensors) > 2]
        counts = [statistics[number][2] for number in counted]
        if counts:
            more = had_some.to(counts[0].dtype)
            by_layer = more.unbind()
            torch._foreach_add_(counts, [_to(by_layer[n], statistics[n][2]) for n in counted])
        rates = self._rates(statistics) * had_some
        ones = torch.ones_like(weights)
        means = moments / torch.where(had_some, weights, ones)[self.layer]
        new, rate = (x.split(self.sizes) for x in (means, rates[self.layer]))
        running = [tensor for tensors in statistics for tensor in tensors[:2]]
        places = [at for at in range(len(self.sizes)) if at % 3]
        torch._foreach_lerp_(
            running,
            [_to(new[at], tensor) for at, tensor in zip(places, running, strict=True)],
            [_to(rate[at], tensor) for at, tensor in zip(places, running, strict=True)],
        )

    def _rates(self, statistics: list[list[Tensor]]) -> Tensor:
        """How far each layer goes: its momentum, or one over its updates, this one included."""
        rates = [norm.running_rate() for norm in self.norms]
        if rates != self._rates_then:
            self._rates_then = rates
            self._constant = self.like.new_tensor([rate or 0.0 for rate in rates])
            self._cumulative = torch.tensor(
                [rate is None for rate in rates], device=self.like.device
            )
        if None not in rates:
            return self._constant
        done = torch.stack([_to(tensors[-1].reshape(-1)[0], self.like) for tensors in statistics])
        return torch.where(self._cumulative, done.clamp(min=1).reciprocal(), self._constant)


def _to(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like, non_blocking=True)
