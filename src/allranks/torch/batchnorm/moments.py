"""The moments that shards leave behind for the running statistics, and who has none.

Mean and variance of a run stand in one tensor, (2, pieces, 1, channels, 1, …), in 32 bits or more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allranks.strategies.shards import Runs, ShardRun
from allranks.torch.model.layers import Normalising, full_type


def is_alone(run: ShardRun, by: Normalising) -> bool:
    """Whether its samples are normalised by the running statistics."""
    return run.lone and by.running is not None


def running_moments(by: Normalising, kind: torch.dtype, ndim: int) -> Tensor:
    """The running statistics as mean and variance of a run whose samples have `ndim` dimensions
    with the pieces: (2, 1, 1, channels, 1, …)."""
    assert by.running is not None
    return torch.stack(by.running).to(kind).view(2, 1, 1, -1, *[1] * (ndim - 3))


def weighted_moments(run: ShardRun, values: int, both: Tensor, by: Normalising) -> Tensor:
    """(weight, weighted mean and variance), summed over the pieces of a run: 1 + 2 channels.

    Each has `values` of each channel, over which `both` were taken.
    """
    moments = torch.cat((both.new_full((1,), run.pieces), both.flatten(2).sum(1).flatten()))
    moments.mul_(run.samples)
    if not by.biased:
        moments[1 + by.features :].mul_(values / (values - 1))
    return moments


def joined(moments: list[Tensor], by: Normalising, like: Tensor) -> Tensor:
    """The moments of all runs; zeros if none has any."""
    if not moments:
        return like.new_zeros(1 + 2 * by.features, dtype=full_type(like.dtype))
    return summed(moments)


def summed(parts: list[Tensor]) -> Tensor:
    """Their sum, in the first one."""
    first, *others = parts
    for part in others:
        first.add_(part)
    return first


def along(channels: Tensor, like: Tensor) -> Tensor:
    """(channels,) -> (channels, 1, …), which goes along (pieces, rows, channels, …)."""
    return channels.view(-1, *[1] * (like.ndim - 3))


# --- compiled ------------------------------------------------------------------------------------
# BatchNorm of many shards as an expression of tensors, which a compiler can take apart and fuse.
#
# So is what a second derivative goes through, or a transform of `torch.func`: there autograd finds
# the derivative. A compiler is given it. What autograd finds in an expression takes each sum over
# the samples by itself, four of them in three loops over memory; written by hand it is two sums in
# one loop, as in torch's own kernel.


def expression(
    input: Tensor, runs: Runs, per_sample: int, by: Normalising
) -> tuple[Tensor, Tensor]:
    """What `by_shard.normalised_runs` returns of the same."""
    outputs, moments = [], []
    at = 0
    for run in runs:
        size = run.pieces * run.samples * per_sample
        part, at = input[at : at + size], at + size
        if is_alone(run, by):
            source = _pieces(part, run.pieces)
            mean, var = running_moments(by, source.dtype, source.ndim).unbind()
            output = _affine((source - mean) * (var + by.eps).rsqrt(), by.weight, by.bias)
            outputs.append(output.to(input.dtype).flatten(0, 1))
        else:
            output, both = _normalised(part, run.pieces, by)
            values = part.numel() // (run.pieces * by.features)
            moments.append(weighted_moments(run, values, both, by))
            outputs.append(output)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output, joined(moments, by, input)


def _normalised(part: Tensor, pieces: int, by: Normalising) -> tuple[Tensor, Tensor]:
    """The rows of a run normalised piece by piece; mean and variance of each, without gradient."""
    if torch.compiler.is_compiling():
        apply: Any = _Traced.apply
        traced: tuple[Tensor, Tensor] = apply(part, by.weight, by.bias, pieces, by.eps)
        return traced
    source = _pieces(part, pieces)
    var, mean = torch.var_mean(source, _samples(source), correction=0, keepdim=True)
    output = _affine((source - mean) * (var + by.eps).rsqrt(), by.weight, by.bias)
    both = torch.stack((mean.detach(), var.detach()))
    return output.to(part.dtype).flatten(0, 1), both


class _Traced(torch.autograd.Function):
    """The same with its derivative: traced by a compiler, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        pieces: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        source = _pieces(part, pieces)
        var, mean = torch.var_mean(source, _samples(source), correction=0, keepdim=True)
        inverse = (var + eps).rsqrt()
        output = _affine((source - mean) * inverse, weight, bias)
        both = torch.stack((mean, var))
        ctx.save_for_backward(part, weight, bias, mean, inverse)
        ctx.mark_non_differentiable(both)
        return output.to(part.dtype).flatten(0, 1), both

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, weight, bias, mean, inverse = ctx.saved_tensors
        source, gradient = (_pieces(of, len(mean)) for of in (part, gradients[0]))
        around = source - mean
        dims = _samples(source)
        plain = gradient.sum(dims, keepdim=True)
        product = (gradient * around).sum(dims, keepdim=True) * inverse
        values = source.numel() // mean.numel()
        scale = inverse if weight is None else inverse * along(weight, source)
        derivative = scale * (gradient - plain / values - around * (product * inverse / values))
        of_part = derivative.to(part.dtype).flatten(0, 1)
        return of_part, _like(product, weight), _like(plain, bias), None, None


def _pieces(part: Tensor, pieces: int) -> Tensor:
    """(rows, channels, …) -> (pieces, rows, channels, …), in 32 bits or more."""
    pieces_of_part: Tensor = part.to(full_type(part.dtype)).unflatten(0, (pieces, -1))
    return pieces_of_part


def _affine(output: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        output = output * along(weight, output)
    return output if bias is None else output + along(bias, output)


def _like(sums: Tensor, channels: Tensor | None) -> Tensor | None:
    """Sums of each piece as the gradient of what goes along the channels."""
    return None if channels is None else sums.sum(0).flatten().to(channels.dtype)


def _samples(source: Tensor) -> tuple[int, ...]:
    """The dimensions of (pieces, rows, channels, …) that a moment is over."""
    return (1, *range(3, source.ndim))
