"""What is made of random bits: masks, and numbers of the distributions that torch draws from."""

from __future__ import annotations

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
