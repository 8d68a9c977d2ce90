"""Two bits a number: a threshold, its negative, or nothing. The bytes are those of MXNet.

Four numbers are in a byte, the first one in its highest bits; a message is whole words of 32 bits
(and here of 64). Codes are 11 for the threshold, 10 for its negative, 00 for nothing; MXNet leaves
01 free, which here says that a number was not finite: it is decoded as NaN, so no rank goes on with
it unseen. At most one threshold is sent of a number in a step, however large its residual is.
Source: `gradient_compression-inl.h` of MXNet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.strategies.reductions.compressed import two_bit_bytes
from allranks.torch.compression.base import Codec
from allranks.torch.compression.kernels import is_double, kernels


class TwoBit(Codec):
    """Sends `threshold` for what is at least that, and its negative likewise."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        return two_bit_bytes(count)

    def encode(self, flat: Tensor) -> Tensor:
        if (library := kernels(flat)) is not None:
            message = torch.empty(two_bit_bytes(flat.numel()), dtype=torch.uint8)
            given = is_double(flat), flat.data_ptr(), flat.numel(), self.threshold
            library.encode_two_bits(*given, message.data_ptr(), message.numel())
            return message
        codes = flat.new_zeros(4 * two_bit_bytes(flat.numel()), dtype=torch.uint8)
        own = codes[: flat.numel()]
        own[flat >= self.threshold] = 3
        own[flat <= -self.threshold] = 2
        own[~flat.isfinite()] = 1
        four = codes.view(-1, 4)
        return four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        if (library := kernels(into, message)) is not None:
            given = is_double(into), message.data_ptr(), into.numel(), self.threshold, alpha
            library.add_two_bits(*given, into.data_ptr())
            return
        shifts = torch.arange(6, -1, -2, device=message.device, dtype=torch.uint8)
        codes = ((message[:, None] >> shifts) & 3).flatten()[: into.numel()]
        values = [0.0, torch.nan, -self.threshold, self.threshold]
        into.add_(into.new_tensor(values)[codes.long()], alpha=alpha)
