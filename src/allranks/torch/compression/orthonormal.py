"""Orthonormal columns by Gram-Schmidt, for many tall matrices of few columns at once."""

from __future__ import annotations

import torch
from torch import Tensor

PASSES = 2  # "twice is enough": Giraud et al. 2005


def orthonormal(matrices: Tensor) -> Tensor:
    """Of (b, n, r): each column less its parts along those before it, of length 1.

    A column that lies in the span of those before it, up to rounding, becomes zero. One order of
    operations, so equal inputs give equal bits; no value comes back to the host.
    """
    found = torch.zeros_like(matrices)
    least = 100 * torch.finfo(matrices.dtype).eps
    for k in range(matrices.shape[2]):
        column = matrices[:, :, k : k + 1]
        size = column.norm(dim=1, keepdim=True)
        before = found[:, :, :k]
        for _ in range(PASSES if k else 0):
            column = column - before @ (before.mT @ column)
        left = column.norm(dim=1, keepdim=True)
        is_new = (left > least * size) | left.isnan()
        found[:, :, k : k + 1] = torch.where(is_new, column / left, torch.zeros_like(column))
    return found
