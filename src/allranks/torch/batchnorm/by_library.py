"""BatchNorm of the shards of a run by kernels of torch, on devices that have good ones.

Operations of tensors make some thirty launches for a layer, and a dozen passes over memory. Here:

    large shards   what `F.batch_norm` takes, for each shard by itself, copied into its slice: the
                   same kernel over the same numbers, wherever the shard goes through
    small ones     shards become channels of one sample, (1, shards * channels, values), and go
                   through torch's own kernel at once: it takes each channel by itself

A run is small or large by the size of its shards alone, never by how many a rank has of them. So
the bits of a shard follow neither; where a small shard is alone on a rank, `F.batch_norm` may take
another kernel, and the last bits differ, as they do where operations of tensors normalise them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from allranks.torch.accelerator import WITH_KERNELS
from allranks.torch.batchnorm.moments import along
from allranks.torch.model.layers import Normalising, full_type

DEVICES = {WITH_KERNELS}
LARGE = 1 << 16
"""Values of a channel in a shard from which on passes over memory cost more than launches."""
ALIGNED = 128  # bytes: kernels may follow the address of what they read

_batch_norm: Any = torch.ops.aten._batch_norm_impl_index.default
_derivative: Any = torch.ops.aten._batch_norm_impl_index_backward.default
_of_channels: Any = torch.ops.aten.native_batch_norm.default
_derivative_of_channels: Any = torch.ops.aten.native_batch_norm_backward.default


def takes(input: Tensor) -> bool:
    """Whether runs of shards that lie there are normalised here."""
    return input.device.type in DEVICES and not torch._C._are_functorch_transforms_active()


def normalise(
    rows: Tensor, source: Tensor, by: Normalising, target: Tensor, out: Tensor, both: Tensor
) -> tuple[list[Tensor], int]:
    """Fill `target`, and `both` with mean and unbiased variance; what `derive` must be given.

    `rows` are those of a run, (rows, channels, …), and `out` has their output; `source` and
    `target` are views of the same, (shards, samples, channels, positions). `both`, of zeros, is
    (2, shards, channels).
    """
    values = source.shape[1] * source.shape[3]
    saved: list[Tensor] = []
    kernel = 0
    if values < LARGE:
        mean, var = (part.flatten() for part in both)
        numbers = _as_channels(source, full_type(source.dtype))
        of_channels = (None, None, mean, var, True, 1.0, by.eps)
        output, *saved = _of_channels(_one_sample(numbers), *of_channels)
        _scaled(_as_shards(output, source), by.weight, by.bias, target)
    else:
        shards = (of.chunk(len(source)) for of in (rows, out))
        for shard, into, mean, var in zip(*shards, *both, strict=True):
            of_shard = (by.weight, by.bias, mean, var, True, 1.0, by.eps)
            enabled = torch.backends.cudnn.enabled
            output, *more, kernel = _batch_norm(_aligned(shard), *of_shard, enabled)
            into.copy_(output)
            saved += more
    if by.biased:
        both[1].mul_((values - 1) / values)
    return saved, kernel


def derive(
    rows: Tensor,
    above: Tensor,
    out: Tensor,
    source: Tensor,
    gradient: Tensor,
    target: Tensor | None,
    weight: Tensor | None,
    eps: float,
    saved: list[Tensor],
    kernel: int,
) -> Tensor:
    """Fill `target`, a view of `out`, with the gradient of `source`, a view of `rows`, unless it is
    `None`; returns the gradients of weight and bias. That of the output is `above`, and `gradient`
    as `source` is.
    """
    shards, needs = len(source), [target is not None, True, True]
    if source.shape[1] * source.shape[3] < LARGE:
        kind = full_type(source.dtype)
        numbers = (_one_sample(_as_channels(of, kind)) for of in (gradient, source))
        ones = _ones(shards * source.shape[2], kind, source.device)
        of_channels = (ones, None, None, *saved, True, eps, needs)
        derivative, *sums = _derivative_of_channels(*numbers, *of_channels)
        if target is not None:
            _scaled(_as_shards(derivative, source), weight, None, target)
        return torch.stack(sums).view(2, shards, -1).sum(1)
    if weight is None:
        weight = _ones(source.shape[2], full_type(source.dtype), source.device)
    each = []
    parts = (of.chunk(shards) for of in (rows, above, out))
    for shard, above_shard, into, mean, inverse, reserve in zip(
        *parts, saved[::3], saved[1::3], saved[2::3], strict=True
    ):
        of_shard = (weight, None, None, mean, inverse, True, eps, needs, reserve)
        derivative, *sums = _derivative(kernel, _aligned(shard), _aligned(above_shard), *of_shard)
        if target is not None:
            into.copy_(derivative)
        each.append(torch.stack(sums))
    return torch.stack(each).sum(0)


@lru_cache(maxsize=256)
def _ones(count: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """A weight that changes nothing: kernels of a device ask for one (read, not run on one).

    The host waits for the copy, once for each size, so every stream may read it.
    """
    return torch.ones(count, dtype=kind).to(device)


def _as_channels(of: Tensor, kind: torch.dtype) -> Tensor:
    """(shards, samples, channels, positions) -> (shards, channels, samples, positions), dense."""
    channels_first = of.transpose(1, 2)
    return torch.empty(channels_first.shape, dtype=kind, device=of.device).copy_(channels_first)


def _one_sample(numbers: Tensor) -> Tensor:
    return numbers.view(1, numbers.shape[0] * numbers.shape[1], -1)


def _as_shards(output: Tensor, source: Tensor) -> Tensor:
    """The way back of both."""
    shards, samples, channels, positions = source.shape
    return output.view(shards, channels, samples, positions).transpose(1, 2)


def _scaled(numbers: Tensor, weight: Tensor | None, bias: Tensor | None, target: Tensor) -> None:
    factor, shift = (None if of is None else along(of, numbers) for of in (weight, bias))
    if factor is None:
        target.copy_(numbers if shift is None else numbers + shift)
    elif shift is None:
        torch.mul(numbers, factor, out=target)
    else:
        torch.addcmul(shift, numbers, factor, out=target)


def _aligned(shard: Tensor) -> Tensor:
    """The shard where memory of its own would begin: a copy, if it lies elsewhere."""
    return shard if shard.data_ptr() % ALIGNED == 0 else shard.clone()
