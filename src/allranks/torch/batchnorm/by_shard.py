"""BatchNorm of many shards in one pass: each is normalised by its own moments.

Shards of one size lie next to each other, so the rows of such a run are a view with the shards as
a dimension of their own, and every kernel runs once for all of them:

    forward    mean, var over (samples, positions) of each (shard, channel)
               output = input * scale + shift, where scale = weight / sqrt(var + eps)
    backward   dx = scale * (dy - mean(dy) - (x - mean) * mean(dy * (x - mean)) / (var + eps))

Sizes of shards differ by at most one: a micro-batch has three runs at most, if some have one sample
only. All write into slices of one output. Nothing is read on the host. Under a compiler the same
is an expression that it can differentiate and fuse; so is what a second derivative goes through, or
a transform of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allranks.strategies.shards import Run, Runs
from allranks.torch.model.layers import Normalising, full_type

MEAN_THEN_SQUARES = {"cpu"}
"""The devices on which a mean, and then the squares around it, take a tenth of Welford's time."""


def is_alone(run: Run, by: Normalising) -> bool:
    """Whether its samples are normalised by the running statistics."""
    return run.lone and by.running is not None


def normalised_runs(
    input: Tensor, runs: Runs, per_sample: int, by: Normalising
) -> tuple[Tensor, Tensor]:
    """`input`, (rows, channels, …), normalised; and (weight, weighted mean and variance).

    `per_sample` rows belong to each sample. The moments are the sums over the shards that have
    some, weighted by their samples, and have no gradient.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _expression(input, runs, per_sample, by)
    apply: Any = _ByShard.apply  # a copy inside of it would have no second derivative
    found: tuple[Tensor, Tensor] = apply(_dense(input), by.weight, by.bias, runs, per_sample, by)
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
    ) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(input)
        kept: list[Tensor] = []
        moments = []
        for run, source, target in _split(runs, per_sample, input, output):
            if is_alone(run, by):
                both = _running(by, full_type(input.dtype))
            else:
                both = _statistics(source, target)
                moments.append(_moments(run, source, both, by))
            inverse = (both[1] + by.eps).rsqrt_()
            _affine(source, both[0], inverse, weight, bias, target)
            kept += both, inverse
        ctx.layout, ctx.by = (runs, per_sample), by
        ctx.save_for_backward(input, weight, bias, *kept)
        found = _joined(moments, by, kept[0])
        ctx.mark_non_differentiable(found)
        ctx.set_materialize_grads(False)
        return output, found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        above = gradients[0]
        if above is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, above), None, None, None)
        input, weight, bias, *kept = ctx.saved_tensors
        above = _dense(above, _format(input))
        found = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        targets = above if found is None else found  # not written then
        sums = []
        split = _split(*ctx.layout, input, above, targets)
        for (run, source, gradient, target), both, inverse in zip(
            split, kept[::2], kept[1::2], strict=True
        ):
            around = source - both[0]
            buffer = target if found is not None and found.dtype == both.dtype else None
            product = torch.mul(gradient, around, out=buffer)
            means = both.new_empty(2, len(source), 1, source.shape[2], 1)
            torch.mean(product, (1, 3), keepdim=True, out=means[0]).mul_(inverse)
            torch.mean(gradient, (1, 3), keepdim=True, dtype=both.dtype, out=means[1])
            values = source.shape[1] * source.shape[3]
            sums.append(means.sum((1, 2, 4)).mul_(values))
            if found is None:
                continue
            scale = inverse if weight is None else inverse * _channels(weight)
            torch.mul(gradient, scale, out=product)
            if not is_alone(run, ctx.by):
                means.mul_(scale)
                means[0].mul_(inverse)
                product.sub_(around.mul_(means[0]).add_(means[1]))
            if buffer is None:
                target.copy_(product)
        of_weight, of_bias = _summed(sums)
        return (
            found,
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            *(None, None, None),
        )


def _statistics(source: Tensor, target: Tensor) -> Tensor:
    """Mean and variance of each (shard, channel) of a run; `target` is written over."""
    kind = full_type(source.dtype)
    if source.device.type not in MEAN_THEN_SQUARES:
        var, mean = torch.var_mean(source.to(kind), (1, 3), correction=0, keepdim=True)
        return torch.stack((mean, var))
    both = source.new_empty(2, source.shape[0], 1, source.shape[2], 1, dtype=kind)
    mean = torch.mean(source, (1, 3), keepdim=True, dtype=kind, out=both[0])
    around = torch.sub(source, mean, out=target) if target.dtype == kind else source - mean
    torch.mean(around.square_(), (1, 3), keepdim=True, out=both[1])
    return both


def _running(by: Normalising, kind: torch.dtype) -> Tensor:
    assert by.running is not None
    return torch.stack(by.running).to(kind).view(2, 1, 1, -1, 1)


def _moments(run: Run, source: Tensor, both: Tensor, by: Normalising) -> Tensor:
    """(weight, weighted mean and variance), summed over the pieces of a run."""
    values = source.shape[1] * source.shape[3]
    found = torch.cat((both.new_full((1,), run.pieces), both.sum((1, 2, 4)).flatten()))
    found.mul_(run.samples)
    if not by.biased:
        found[1 + by.features :].mul_(values / (values - 1))
    return found


def _joined(moments: list[Tensor], by: Normalising, like: Tensor) -> Tensor:
    if not moments:
        return like.new_zeros(1 + 2 * by.features, dtype=full_type(like.dtype))
    return _summed(moments)


def _affine(
    source: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
) -> None:
    """`target` = (source - mean) * inverse * weight + bias, which is one scale and one shift."""
    scale = inverse if weight is None else inverse * _channels(weight)
    if bias is None:
        shift = (mean * scale).neg_()
    else:
        shift = torch.addcmul(_channels(bias), mean, scale, value=-1)
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
    output, _ = _expression(given[0], runs, per_sample, by)
    wanted = [tensor for tensor, need in zip(given, needs, strict=True) if need]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


def _expression(
    input: Tensor, runs: Runs, per_sample: int, by: Normalising
) -> tuple[Tensor, Tensor]:
    """The whole of it as one expression of tensors."""
    outputs, moments = [], []
    kind, at = full_type(input.dtype), 0
    for run in runs:
        size = run.pieces * run.samples * per_sample
        part, at = input[at : at + size], at + size
        source = part.to(kind).unflatten(0, (run.pieces, -1))
        source = source.flatten(3) if source.ndim > 3 else source.unsqueeze(3)
        # (pieces, rows, channels, positions), one if there are none
        if is_alone(run, by):
            mean, var = _running(by, kind).unbind()
        else:
            var, mean = torch.var_mean(source, (1, 3), correction=0, keepdim=True)
            both = torch.stack((mean.detach(), var.detach()))
            moments.append(_moments(run, source, both, by))
        found = (source - mean) * (var + by.eps).rsqrt()
        if by.weight is not None:
            found = found * _channels(by.weight)
        if by.bias is not None:
            found = found + _channels(by.bias)
        outputs.append(found.to(input.dtype).flatten(0, 1).view(part.shape))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output, _joined(moments, by, input)


def _summed(parts: list[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first.add_(part)
    return first


def _split(runs: Runs, per_sample: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each run, and what it is of each tensor: a view (shards, samples, channels, positions).

    Where channels come last in memory: (shards, samples and positions, channels, 1).
    """
    at = 0
    last = not tensors[0].is_contiguous()
    for run in runs:
        rows = run.samples * per_sample
        end = at + run.pieces * rows
        own = (tensor[at:end] for tensor in tensors)
        if last:
            yield run, *(t.movedim(1, -1).view(run.pieces, -1, t.shape[1], 1) for t in own)
        else:
            yield run, *(t.view(run.pieces, rows, t.shape[1], -1) for t in own)
        at = end


def _format(tensor: Tensor) -> torch.memory_format:
    """How the numbers of a tensor lie in memory, if they lie densely; else how they should."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _dense(tensor: Tensor, format: torch.memory_format | None = None) -> Tensor:
    return tensor.contiguous(memory_format=format or _format(tensor))


def _channels(values: Tensor) -> Tensor:
    """(channels,) -> (channels, 1), which goes along (shards, samples, channels, positions)."""
    return values.view(-1, 1)
