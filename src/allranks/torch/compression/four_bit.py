"""Four bits a number: a sign and a power of two, as Streaming DiLoCo sends outer gradients (E3M0).

Numbers are cut into chunks, each with a scale, the largest magnitude in it. What is sent of a
number is 0 or one of seven magnitudes, scale / 64, scale / 32, ... scale: the nearest one, the
larger where two are as near. Two numbers are in a byte, the first one in its low bits; bit 3 is the
sign, the others are the exponent, 0 for nothing. Codes come first, then scales as float32.

A chunk with a number that is not finite has a scale that is none, and is decoded as NaN, so no rank
goes on with it unseen. Douillard et al. 2025, arXiv 2501.18512; how numbers are scaled it does not
say: the chunks are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.strategies.reductions.compressed import four_bit_bytes
from allranks.torch.compression.base import Codec
from allranks.torch.compression.kernels import is_double, kernels

CHUNK = 512
MAGNITUDES = 7
SIGN = 8


class FourBit(Codec):
    """Sends each number as a sign and one of seven powers of two of the scale of its chunk."""

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        return four_bit_bytes(count)

    def encode(self, flat: Tensor) -> Tensor:
        if (library := kernels(flat)) is not None:
            message = torch.empty(four_bit_bytes(flat.numel()), dtype=torch.uint8)
            given = is_double(flat), flat.data_ptr(), flat.numel()
            library.encode_four_bits(*given, message.data_ptr(), message.numel())
            return message
        message = flat.new_zeros(four_bit_bytes(flat.numel()), dtype=torch.uint8)
        chunks = _in_chunks(flat)
        scales = chunks.abs().amax(1).float()
        size = chunks.abs().div_(scales.to(flat.dtype)[:, None]).nan_to_num_(nan=0.0)
        codes = torch.frexp(size * (2 / 3)).exponent.add_(MAGNITUDES).clamp_(1, MAGNITUDES)
        codes *= size >= 2.0**-MAGNITUDES  # less than that is nearer to nothing
        codes += SIGN * (chunks < 0)
        pair = codes.to(torch.uint8).view(-1, 2)
        packed = (pair[:, 0] | pair[:, 1] << 4)[: -(-flat.numel() // 2)]
        message[: packed.numel()] = packed
        at = _scales_at(flat.numel())
        message[at : at + 4 * len(scales)] = scales.view(torch.uint8)
        return message

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        count = into.numel()
        if (library := kernels(into, message)) is not None:
            given = is_double(into), message.data_ptr(), count, alpha
            library.add_four_bits(*given, into.data_ptr())
            return
        packed, at = message[: -(-count // 2)], _scales_at(count)
        scales = message[at : at + 4 * -(-count // CHUNK)].view(torch.float32).to(into.dtype)
        codes = torch.stack([packed & 15, packed >> 4], 1).flatten().int()
        sizes = [0.0, *(2.0 ** (code - MAGNITUDES) for code in range(1, MAGNITUDES + 1))]
        values = into.new_tensor([*sizes, *(-size for size in sizes)])[codes]
        whole = _in_chunks(values) * scales[:, None]
        into.add_(whole.flatten()[:count] * alpha)  # rounded as in C, not fused


def _in_chunks(flat: Tensor) -> Tensor:
    """The numbers, (chunks, CHUNK), with zeros behind them."""
    chunks = -(-flat.numel() // CHUNK)
    behind = flat.new_zeros(chunks * CHUNK - flat.numel())
    return torch.cat([flat, behind]).view(chunks, CHUNK)


def _scales_at(count: int) -> int:
    """Where the scales begin: at whole words, so that they lie as numbers do."""
    return 4 * -(-count // 8)
