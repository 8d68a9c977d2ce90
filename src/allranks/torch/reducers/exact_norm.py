"""The norm of a gradient, to the last bit the same whoever holds which part of it.

A sum of floating-point numbers follows their order, and the order follows how tensors are cut. Here
each square is split at fixed powers of two into three numbers, and each of those is a multiple of a
unit that is coarse enough for all of them to add up without rounding: a sum that no order changes.
Demmel and Nguyen 2015, Parallel Reproducible Summation, IEEE Transactions on Computers 64(7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allranks.torch.model.reals import reals

SPLITS = 3
MANTISSA = 52  # bits of a float64, of which those of the count of elements are kept free
BLOCK = 1 << 16  # elements that are split at once, while they are in the cache

Everywhere = Callable[[Tensor], Tensor]
"""The row that each rank gives, (ranks, row); every rank calls it alike."""


def exact_norm(tensors: Sequence[Tensor], everywhere: Everywhere = lambda row: row[None]) -> float:
    """The 2-norm of all `tensors` of all ranks, of which each holds a part of its own.

    Not finite exactly if one of the elements is not. With `everywhere` it communicates twice, five
    numbers from each rank in all.
    """
    flats = [reals(tensor.detach()).reshape(-1) for tensor in tensors if tensor.numel()]
    device = tensors[0].device if tensors else torch.device("cpu")
    count = sum(flat.numel() for flat in flats)
    own = torch.tensor([0.0, count], dtype=torch.float64, device=device)
    if flats:
        own[0] = torch.stack([flat.abs().amax().double() for flat in flats]).amax()
    rows = everywhere(own)
    largest, count = float(rows[:, 0].amax()), int(rows[:, 1].sum())
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    sums = torch.zeros(SPLITS, dtype=torch.float64, device=device)
    for flat in flats:
        for block in flat.split(BLOCK):
            sums += _split_sums(block.double() * 2.0**-exponent, count.bit_length())
    total = everywhere(sums).sum(dim=0)
    return math.sqrt(math.fsum(total.tolist())) * 2.0**exponent


def _split_sums(values: Tensor, bits: int) -> Tensor:
    """The sums of the squares of `values`, all below 1, split at units; none of them is rounded.

    `bits` is how many the count of all elements has.
    """
    rest = values.square_()
    sums = []
    power = bits - MANTISSA
    for _ in range(SPLITS):
        shift = 1.5 * 2.0 ** (MANTISSA + power)  # what is added to it is rounded to 2 ** power
        high = rest.add(shift).sub_(shift)
        rest = rest.sub_(high)
        sums.append(high.sum())
        power += bits - MANTISSA - 1
    return torch.stack(sums)
