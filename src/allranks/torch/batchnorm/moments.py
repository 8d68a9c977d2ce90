"""The moments that shards leave behind for the running statistics, and who has none.

Mean and variance of a run stand in one tensor, (2, pieces, 1, channels, 1, …), in 32 bits or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.strategies.shards import Run
from allranks.torch.model.layers import Normalising, full_type


def is_alone(run: Run, by: Normalising) -> bool:
    """Whether its samples are normalised by the running statistics."""
    return run.lone and by.running is not None


def running_moments(by: Normalising, kind: torch.dtype, ndim: int) -> Tensor:
    """The running statistics as mean and variance of a run whose samples have `ndim` dimensions
    with the pieces: (2, 1, 1, channels, 1, …)."""
    assert by.running is not None
    return torch.stack(by.running).to(kind).view(2, 1, 1, -1, *[1] * (ndim - 3))


def weighted_moments(run: Run, values: int, both: Tensor, by: Normalising) -> Tensor:
    """(weight, weighted mean and variance), summed over the pieces of a run: 1 + 2 channels.

    Each has `values` of each channel, over which `both` were taken.
    """
    found = torch.cat((both.new_full((1,), run.pieces), both.flatten(2).sum(1).flatten()))
    found.mul_(run.samples)
    if not by.biased:
        found[1 + by.features :].mul_(values / (values - 1))
    return found


def joined(moments: list[Tensor], by: Normalising, like: Tensor) -> Tensor:
    """The moments of all runs; zeros if none has any."""
    if not moments:
        return like.new_zeros(1 + 2 * by.features, dtype=full_type(like.dtype))
    return summed(moments)


def summed(parts: list[Tensor]) -> Tensor:
    """Their sum, in the first one."""
    first, *rest = parts
    for part in rest:
        first.add_(part)
    return first


def along(channels: Tensor, like: Tensor) -> Tensor:
    """(channels,) -> (channels, 1, …), which goes along (pieces, rows, channels, …)."""
    return channels.view(-1, *[1] * (like.ndim - 3))
