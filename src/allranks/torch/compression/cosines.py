"""The largest cosine coefficients of each block of a tensor: its slow components in few numbers.

A matrix is cut into blocks of rows and columns, a vector into runs, whose lengths divide its own.
A block X becomes A X B', where A and B are the cosine transforms of its two lengths (DCT-II). They
are orthonormal, so A' Y B restores X. The k largest coefficients of each block are sent by
`codecs.TopK`. Peng et al. 2024, DeMo, arXiv 2411.19870.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from allranks.strategies.compressed import cosine_block
from allranks.torch.compression.codecs import Codec, TopK


@lru_cache(maxsize=256)
def cosines(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II, (count, count): row k is sqrt(2/n) cos(pi (2i+1) k / 2n) over i.

    Row 0 is sqrt(1/n). Computed in float64.
    """
    at = torch.arange(count, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * count) * (2 * at + 1) * at[:, None]) * math.sqrt(2 / count)
    matrix[0] = math.sqrt(1 / count)
    return matrix.to(device, dtype)


class CosineBlocks(Codec):
    """Keeps `keep` coefficients of each block of a tensor of `shape`; the transform is lossless.

    A block has at most `chunk` rows and columns. Encodes the flat tensor.
    """

    def __init__(self, shape: tuple[int, ...], keep: int, chunk: int) -> None:
        self.rows, self.columns = cosine_block(shape, chunk)
        count = math.prod(shape)
        self.width = count if self.rows == 1 else count // max(shape[0], 1)
        block = self.rows * self.columns
        self.coefficients = TopK(min(keep, block), block)

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        return self.coefficients.size_bytes(count, itemsize)

    def encode(self, flat: Tensor) -> Tensor:
        return self.coefficients.encode(self.transformed(flat))

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        coefficients = torch.zeros_like(into)
        self.coefficients.add_decoded(message, coefficients)
        into.add_(self.restored(coefficients), alpha=alpha)

    def transformed(self, flat: Tensor) -> Tensor:
        """The coefficients of (n,), block by block, (n,)."""
        rows, columns = self._transforms(flat)
        blocks = flat.view(-1, self.rows, self.width // self.columns, self.columns).transpose(1, 2)
        return (rows @ blocks @ columns.T).flatten()

    def restored(self, coefficients: Tensor) -> Tensor:
        """The inverse of `transformed`."""
        rows, columns = self._transforms(coefficients)
        blocks = coefficients.view(-1, self.width // self.columns, self.rows, self.columns)
        return (rows.T @ blocks @ columns).transpose(1, 2).flatten()

    def _transforms(self, like: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (cosines(n, like.dtype, like.device) for n in (self.rows, self.columns))
        return rows, columns


class CodecParts(Codec):
    """A codec for each part of a flat tensor: `parts` are (start, count, codec).

    Numbers between the parts are not sent.
    """

    def __init__(self, parts: Sequence[tuple[int, int, Codec]]) -> None:
        self.parts = parts

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        return sum(codec.size_bytes(length, itemsize) for _, length, codec in self.parts)

    def encode(self, flat: Tensor) -> Tensor:
        return torch.cat([codec.encode(flat[at : at + length]) for at, length, codec in self.parts])

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        begun = 0
        for at, length, codec in self.parts:
            size = codec.size_bytes(length, into.element_size())
            codec.add_decoded(message[begun : begun + size], into[at : at + length], alpha)
            begun += size


# --- orthonormal ---------------------------------------------------------------------------------
# Orthonormal columns by Gram-Schmidt, for many tall matrices of few columns at once.


PASSES = 2  # "twice is enough": Giraud et al. 2005


def orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormalise the columns of (b, n, r), in order.

    A column in the span of those before it, up to rounding, becomes zero. The order of operations
    is fixed, so equal inputs give equal bits; does not synchronise with the host.
    """
    basis = torch.zeros_like(matrices)
    least = 100 * torch.finfo(matrices.dtype).eps
    for k in range(matrices.shape[2]):
        column = matrices[:, :, k : k + 1]
        size = column.norm(dim=1, keepdim=True)
        before = basis[:, :, :k]
        for _ in range(PASSES if k else 0):
            column = column - before @ (before.mT @ column)
        remainder = column.norm(dim=1, keepdim=True)
        is_new = (remainder > least * size) | remainder.isnan()
        basis[:, :, k : k + 1] = torch.where(is_new, column / remainder, torch.zeros_like(column))
    return basis
