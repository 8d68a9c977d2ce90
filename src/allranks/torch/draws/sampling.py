"""What is made of random bits: masks, and numbers of the distributions that torch draws from."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from allranks.torch.draws.counter import HALF, WORD, Finish


def threshold(rate: float) -> int:
    """The int32 below which are random bits with this probability, in steps of 2^-32."""
    return min(round(rate * WORD), WORD - 1) - HALF


def kept(rate: float, dtype: torch.dtype) -> Finish:
    """A mask of dropout: 0 with this probability, else what the mean stays the same by."""

    def finish(bits: Tensor) -> Tensor:
        if rate >= 1:
            return torch.zeros(bits.shape, dtype=dtype, device=bits.device)
        if torch.compiler.is_compiling():
            return bits.ge(threshold(rate)).to(dtype) / (1 - rate)
        mask = torch.empty(bits.shape, dtype=dtype, device=bits.device)
        return torch.ge(bits, threshold(rate), out=mask).div_(1 - rate)

    return finish


@cache
def scale_of(rate: float, dtype: torch.dtype) -> float:
    """What a mask of dropout has where it is not 0, rounded to this type."""
    return 0.0 if rate >= 1 else torch.ones((), dtype=dtype).div_(1 - rate).item()


def unit(bits: Tensor) -> Tensor:
    """Numbers of float64 between 0 and 1, neither of them: 2^32 of them, evenly apart."""
    return bits.to(torch.float64).add_(HALF + 0.5).mul_(1 / WORD)


def uniform(low: float, high: float, dtype: torch.dtype) -> Finish:
    """Numbers of [low, high), of as many bits as `dtype` has between 0 and 1."""
    size = torch.finfo(dtype).eps / 2

    def finish(bits: Tensor) -> Tensor:
        numbers = unit(bits).div_(size).floor_().mul_(size * (high - low)).add_(low)
        return numbers.to(dtype)

    return finish


def normal(bits: Tensor) -> Tensor:
    """Numbers of the standard normal distribution, by its inverse: none beyond 6.4 deviations."""
    numbers: Tensor = torch.special.ndtri(unit(bits))
    return numbers


def whole_numbers(low: int, high: int) -> Finish:
    """Whole numbers of [low, high), at most 2^31 of them, as int64."""

    def finish(bits: Tensor) -> Tensor:
        return bits.to(torch.int64).add_(HALF).mul_(high - low).bitwise_right_shift_(32).add_(low)

    return finish
