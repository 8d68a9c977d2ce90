"""Columns in a few bits a number, each with a range of its own. The bytes are those of CNTK.

A column of M numbers becomes words of 32 bits, then `lower` and `upper` as float32. With n bits a
number and W words, the bits from n k on of word w are those of number w + k W: not of one that
follows. Of one bit: [a >= 0], decoded as the mean of all that have the same; these two means are
a quarter and three quarters of the way from `lower` to `upper`. Of more bits: steps of one size
between -4 and 4 times the root of the mean square, decoded at their middle.

Seide et al. 2014, 1-bit SGD; CNTK's `ColumnQuantizer.h` and `ValueQuantizer.h`, with the threshold
at zero, as its Python API has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.strategies.reductions.compressed import column_bytes
from allranks.torch.compression.kernels import is_double, kernels

WORD = 32
RANGE = 4.0  # in roots of the mean square


class ColumnQuantizer:
    """1, 2, 4, 8 or 16 bits a number. Nothing is communicated; equal columns give equal bytes."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.steps = 2 if bits == 1 else 2**bits - 1  # between lower and upper

    def encode(self, columns: Tensor) -> Tensor:
        """Messages of (c, M): uint8, (c, column_bytes(M, bits))."""
        if (library := kernels(columns)) is not None:
            count, length = columns.shape
            sent = torch.empty((count, column_bytes(length, self.bits)), dtype=torch.uint8)
            given = is_double(columns), columns.data_ptr(), count, length, self.bits
            library.encode_columns(*given, sent.data_ptr())
            return sent
        codes, lower, upper = self._one_bit(columns) if self.bits == 1 else self._many(columns)
        count, length = columns.shape
        slots = WORD // self.bits
        words = -(-length * self.bits // WORD)
        laid = codes.new_zeros((count, slots * words))
        laid[:, :length] = codes
        shifts = torch.arange(0, WORD, self.bits, device=codes.device)[:, None]
        packed = (laid.view(count, slots, words) << shifts).sum(1)
        low = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
        bounds = torch.stack([lower, upper], 1)
        return torch.cat([low.view(torch.uint8), bounds.view(torch.uint8)], 1)

    def decode(self, messages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """What `messages` say, (c, length)."""
        into = torch.empty(len(messages), length, dtype=dtype, device=messages.device)
        self.add_decoded(messages, into, adds=False)
        return into

    def add_decoded(
        self, messages: Tensor, into: Tensor, alpha: float = 1, *, adds: bool = True
    ) -> None:
        """Add `alpha` times what `messages` say to `into`, (c, M); or lay it there."""
        messages, (count, length) = messages.contiguous(), into.shape
        assert messages.shape == (count, column_bytes(length, self.bits))
        if (library := kernels(into, messages)) is not None:
            given = is_double(into), messages.data_ptr(), count, length, self.bits
            library.decode_columns(*given, into.data_ptr(), alpha, adds)
        elif adds:
            into.add_(self._values(messages, length, into.dtype), alpha=alpha)
        else:
            into.copy_(self._values(messages, length, into.dtype)).mul_(alpha)

    def _values(self, messages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        found = messages.view(torch.int32).long()
        shifts = torch.arange(0, WORD, self.bits, device=messages.device)[:, None]
        codes = (found[:, None, :-2] >> shifts) & (2**self.bits - 1)
        bounds = messages.view(torch.float32)[:, -2:].to(dtype)
        lower, upper = bounds[:, :1], bounds[:, 1:]
        codes = codes.flatten(1)[:, :length]
        values: Tensor = (codes.to(dtype) + 0.5) / self.steps * (upper - lower) + lower
        return values

    def _one_bit(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        above = columns >= 0
        zero = torch.zeros_like(columns)
        high = torch.where(above, columns, zero).sum(1) / above.sum(1).clamp(min=1)
        low = torch.where(above, zero, columns).sum(1) / (~above).sum(1).clamp(min=1)
        half = (high - low) / 2
        return above.long(), (low - half).float(), (high + half).float()

    def _many(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        upper = (RANGE * columns.square().mean(1).sqrt()).float()
        size = upper[:, None].to(columns.dtype)
        steps = ((columns + size) * (self.steps / (2 * size))).nan_to_num(0)
        return steps.trunc().clamp(0, self.steps).long(), -upper, upper
