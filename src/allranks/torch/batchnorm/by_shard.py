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
derivatives and transforms of `torch.func` get an `expression` of the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allranks.strategies.shards import Run, Runs
from allranks.torch.batchnorm import by_library, in_c
from allranks.torch.batchnorm.expression import expression
from allranks.torch.batchnorm.moments import (
    along,
    is_alone,
    joined,
    running_moments,
    summed,
    weighted_moments,
)
from allranks.torch.model.layers import Normalising, full_type

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
    found: tuple[Tensor, Tensor] = apply(
        _dense(input), by.weight, by.bias, runs, per_sample, by, both
    )
    return found


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
        kept: list[Tensor] = []
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
                kept += more
                kinds.append((len(more), kernel))
                continue
            found, inverse = _normalise(run, source, weight, bias, by, target)
            if not is_alone(run, by):
                values = source.shape[1] * source.shape[3]
                moments.append(weighted_moments(run, values, found, by))
            kept += found[0], inverse
            kinds.append((2, None))
        ctx.layout, ctx.by, ctx.kinds = (runs, per_sample), by, kinds
        ctx.save_for_backward(input, weight, bias, *kept)
        found = kept[0] if both is not None else joined(moments, by, kept[0])
        ctx.mark_non_differentiable(found)
        ctx.set_materialize_grads(False)
        return output, found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        above = gradients[0]
        if above is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, above), None, None, None, None)
        input, weight, bias, *kept = ctx.saved_tensors
        above = _dense(above, _format(input))
        found = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        targets = above if found is None else found  # not written then
        at, sums = 0, []
        split = _split(*ctx.layout, input, above, targets)
        for (run, rows, source, gradient, target), (count, kernel) in zip(
            split, ctx.kinds, strict=True
        ):
            of_run, at = kept[at : at + count], at + count
            to = None if found is None else target
            if kernel is None:
                mean, inverse = of_run
                sums.append(_derive(run, source, gradient, weight, mean, inverse, ctx.by, to))
                continue
            whole = (input[rows], above[rows], targets[rows])
            views = (source, gradient, to)
            sums.append(by_library.derive(*whole, *views, weight, ctx.by.eps, of_run, kernel))
        of_weight, of_bias = summed(sums)
        return (
            found,
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            *(None, None, None, None),
        )


def _normalise(
    run: Run,
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    by: Normalising,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `target`; mean and variance of each (shard, channel), and 1 / sqrt(var + eps)."""
    alone = is_alone(run, by)
    library = None if alone else in_c.library_for(source, target, weight, bias)
    if library is not None:
        return in_c.normalise(library, source, weight, bias, by.eps, target)
    if alone:
        both = running_moments(by, full_type(source.dtype), source.ndim)
    else:
        both = _statistics(source, target)
    mean, var = both.unbind()
    inverse = (var + by.eps).rsqrt_()
    _affine(source, mean, inverse, weight, bias, target)
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
    run: Run,
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


def _affine(
    source: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
) -> None:
    """`target` = (source - mean) * inverse * weight + bias, which is one scale and one shift."""
    scale = inverse if weight is None else inverse * along(weight, source)
    if bias is None:
        shift = (mean * scale).neg_()
    else:
        shift = torch.addcmul(along(bias, source), mean, scale, value=-1)
    if target.dtype == scale.dtype:
        torch.mul(source, scale, out=target).add_(shift)
    else:
        target.copy_((source * scale).add_(shift))


def _differentiable(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients as functions of what they came from, for a second derivative."""
    given = ctx.saved_tensors[:3]
    needs = ctx.needs_input_grad[:3]
    by = replace(ctx.by, weight=given[1], bias=given[2])
    runs, per_sample = ctx.layout
    output, _ = expression(given[0], runs, per_sample, by)
    wanted = [tensor for tensor, need in zip(given, needs, strict=True) if need]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


def _split(runs: Runs, per_sample: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each run, its rows, and what it is of each tensor: (shards, samples, channels, positions).

    Where channels come last in memory: (shards, samples and positions, channels, 1).
    """
    at = 0
    last = not tensors[0].is_contiguous()
    for run in runs:
        rows = run.samples * per_sample
        end = at + run.pieces * rows
        own = tensors if rows * run.pieces == len(tensors[0]) else [t[at:end] for t in tensors]
        where = slice(at, end)
        if last:
            yield run, where, *(t.movedim(1, -1).view(run.pieces, -1, t.shape[1], 1) for t in own)
        else:
            yield run, where, *(t.view(run.pieces, rows, t.shape[1], -1) for t in own)
        at = end


def _format(tensor: Tensor) -> torch.memory_format:
    """How the numbers of a tensor lie in memory, if they lie densely; else how they should."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _dense(tensor: Tensor, format: torch.memory_format | None = None) -> Tensor:
    return tensor.contiguous(memory_format=format or _format(tensor))
