"""Codecs: a flat tensor becomes bytes of a size known in advance, and is added back.

Error feedback: the error of a codec in one message is added to the next one.

    e <- decay * e + x;  send encode(e);  e <- e - decoded

So nothing is lost, only delayed: with decay 1 the sum of all decoded messages and the residual e is
the sum of all inputs. Seide et al. 2014 (1-bit SGD); with a decay: SparseLoCo, arXiv 2508.15706.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType

import torch
from torch import Tensor

from allranks.strategies import compressed
from allranks.strategies.card import Picked
from allranks.strategies.compressed import (
    LARGEST_CHUNK,
    check_top_k,
    column_bytes,
    four_bit_bytes,
    kept_numbers,
    two_bit_bytes,
)
from allranks.torch.native import built

# --- kernels -------------------------------------------------------------------------------------
# The loops of the codecs in C (`native/`), if they were compiled, for contiguous CPU tensors.
#
# They give the same bytes as the torch code next to each call, tens of times faster. Only bounds
# and means may differ in their last bits, as C sums them in float64. The torch code runs without
# the library, on other devices and for other types.


LIBRARY = built("allranks.torch.compression._codecs")
TYPES = (torch.float32, torch.float64)


def kernels(numbers: Tensor, *more: Tensor) -> ModuleType | None:
    """The library, if it supports these numbers and the memory of `more`, else `None`."""
    if LIBRARY is None or numbers.dtype not in TYPES:
        return None
    fits = all(t.device.type == "cpu" and t.is_contiguous() for t in (numbers, *more))
    return LIBRARY if fits else None


def is_double(numbers: Tensor) -> bool:
    """Whether the numbers are float64, not float32."""
    return numbers.dtype == torch.float64


class Codec(ABC):
    """Encodes a flat tensor. Nothing is communicated; equal tensors give equal bytes."""

    @abstractmethod
    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        """The size of a message of `count` numbers of `itemsize` bytes: a multiple of 8."""

    @abstractmethod
    def encode(self, flat: Tensor) -> Tensor:
        """The message of `flat`, (n,): uint8, (size_bytes(n, flat.itemsize),)."""

    @abstractmethod
    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        """Add `alpha` times the decoded `message` to `into`, (n,), of the type that was encoded.

        `message` begins at a multiple of 8 bytes.
        """


# --- columns -------------------------------------------------------------------------------------
# Columns in a few bits per number, each with its own range. The bytes are those of CNTK.
#
# A column of M numbers becomes words of 32 bits, then `lower` and `upper` as float32. With n bits
# per number and W words, bits n k and up of word w have number w + k W, not the next one. With one
# bit: [a >= 0], decoded as the mean of all numbers with that bit; these two means are a quarter and
# three quarters of the way from `lower` to `upper`. With more bits: equal steps between -4 and 4
# times the root of the mean square, decoded at their middle.
#
# Seide et al. 2014, 1-bit SGD; CNTK's `ColumnQuantizer.h` and `ValueQuantizer.h`, with the
# threshold at zero, as in its Python API.


WORD = 32
RANGE = 4.0  # in roots of the mean square


class ColumnQuantizer:
    """1, 2, 4, 8 or 16 bits per number. No communication; equal columns give equal bytes."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.steps = 2 if bits == 1 else 2**bits - 1  # between lower and upper

    def encode(self, columns: Tensor) -> Tensor:
        """Messages of (c, M): uint8, (c, column_bytes(M, bits))."""
        if (library := kernels(columns)) is not None:
            count, length = columns.shape
            messages = torch.empty((count, column_bytes(length, self.bits)), dtype=torch.uint8)
            arguments = is_double(columns), columns.data_ptr(), count, length, self.bits
            library.encode_columns(*arguments, messages.data_ptr())
            return messages
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
        """The decoded `messages`, (c, length)."""
        into = torch.empty(len(messages), length, dtype=dtype, device=messages.device)
        self.add_decoded(messages, into, adds=False)
        return into

    def add_decoded(
        self, messages: Tensor, into: Tensor, alpha: float = 1, *, adds: bool = True
    ) -> None:
        """Add `alpha` times the decoded `messages` to `into`, (c, M); or overwrite it."""
        messages, (count, length) = messages.contiguous(), into.shape
        assert messages.shape == (count, column_bytes(length, self.bits))
        if (library := kernels(into, messages)) is not None:
            arguments = is_double(into), messages.data_ptr(), count, length, self.bits
            library.decode_columns(*arguments, into.data_ptr(), alpha, adds)
        elif adds:
            into.add_(self._values(messages, length, into.dtype), alpha=alpha)
        else:
            into.copy_(self._values(messages, length, into.dtype)).mul_(alpha)

    def _values(self, messages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        words = messages.view(torch.int32).long()
        shifts = torch.arange(0, WORD, self.bits, device=messages.device)[:, None]
        codes = (words[:, None, :-2] >> shifts) & (2**self.bits - 1)
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


# --- two bit -------------------------------------------------------------------------------------
# Two bits per number: a threshold, its negative, or zero. The bytes are those of MXNet.
#
# A byte has four numbers, the first one in its highest bits; a message is whole words of 32 bits
# (here of 64). Codes are 11 for the threshold, 10 for its negative, 00 for zero. MXNet does not use
# 01; here it marks a number that is not finite: it is decoded as NaN, so that no rank continues
# unaware. A step sends at most one threshold per number, however large its residual is. Source:
# `gradient_compression-inl.h` of MXNet.


class TwoBit(Codec):
    """Sends `threshold` for numbers of at least that, and its negative likewise."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        return two_bit_bytes(count)

    def encode(self, flat: Tensor) -> Tensor:
        if (library := kernels(flat)) is not None:
            message = torch.empty(two_bit_bytes(flat.numel()), dtype=torch.uint8)
            arguments = is_double(flat), flat.data_ptr(), flat.numel(), self.threshold
            library.encode_two_bits(*arguments, message.data_ptr(), message.numel())
            return message
        codes = flat.new_zeros(4 * two_bit_bytes(flat.numel()), dtype=torch.uint8)
        of_flat = codes[: flat.numel()]
        of_flat[flat >= self.threshold] = 3
        of_flat[flat <= -self.threshold] = 2
        of_flat[~flat.isfinite()] = 1
        four = codes.view(-1, 4)
        return four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        if (library := kernels(into, message)) is not None:
            arguments = is_double(into), message.data_ptr(), into.numel(), self.threshold, alpha
            library.add_two_bits(*arguments, into.data_ptr())
            return
        shifts = torch.arange(6, -1, -2, device=message.device, dtype=torch.uint8)
        codes = ((message[:, None] >> shifts) & 3).flatten()[: into.numel()]
        values = [0.0, torch.nan, -self.threshold, self.threshold]
        into.add_(into.new_tensor(values)[codes.long()], alpha=alpha)


# --- four bit ------------------------------------------------------------------------------------
# Four bits per number: a sign and a power of two, as in Streaming DiLoCo's outer gradients (E3M0).
#
# Numbers are cut into chunks, each with a scale, its largest magnitude. A number is sent as 0 or
# one of seven magnitudes, scale / 64, scale / 32, ... scale: the nearest one, the larger of two at
# equal distance. A byte has two numbers, the first one in its low bits; bit 3 is the sign, the
# others are the exponent, 0 for zero. Codes come first, then scales as float32.
#
# A chunk with a number that is not finite has a scale that is not finite, and is decoded as NaN, so
# that no rank continues unaware. Douillard et al. 2025, arXiv 2501.18512, which does not describe
# the scaling: the chunks are ours.


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
            arguments = is_double(flat), flat.data_ptr(), flat.numel()
            library.encode_four_bits(*arguments, message.data_ptr(), message.numel())
            return message
        message = flat.new_zeros(four_bit_bytes(flat.numel()), dtype=torch.uint8)
        chunks = _in_chunks(flat)
        scales = chunks.abs().amax(1).float()
        size = chunks.abs().div_(scales.to(flat.dtype)[:, None]).nan_to_num_(nan=0.0)
        codes = torch.frexp(size * (2 / 3)).exponent.add_(MAGNITUDES).clamp_(1, MAGNITUDES)
        codes *= size >= 2.0**-MAGNITUDES  # a smaller number is nearer to 0
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
            arguments = is_double(into), message.data_ptr(), count, alpha
            library.add_four_bits(*arguments, into.data_ptr())
            return
        packed, at = message[: -(-count // 2)], _scales_at(count)
        scales = message[at : at + 4 * -(-count // CHUNK)].view(torch.float32).to(into.dtype)
        codes = torch.stack([packed & 15, packed >> 4], 1).flatten().int()
        sizes = [0.0, *(2.0 ** (code - MAGNITUDES) for code in range(1, MAGNITUDES + 1))]
        values = into.new_tensor([*sizes, *(-size for size in sizes)])[codes]
        whole = _in_chunks(values) * scales[:, None]
        into.add_(whole.flatten()[:count] * alpha)  # rounded as in C, not fused


def _in_chunks(flat: Tensor) -> Tensor:
    """The numbers, (chunks, CHUNK), padded with zeros."""
    chunks = -(-flat.numel() // CHUNK)
    behind = flat.new_zeros(chunks * CHUNK - flat.numel())
    return torch.cat([flat, behind]).view(chunks, CHUNK)


def _scales_at(count: int) -> int:
    """The offset of the scales, aligned to words."""
    return 4 * -(-count // 8)


# --- top k ---------------------------------------------------------------------------------------
# Chunked top-k: the k numbers of largest magnitude in each chunk of a tensor, and their indices.
#
# A message is, one after another: the values, chunk by chunk, in the order of their indices; with
# values in 2 bits, then a scale for each chunk; and the indices in their chunks, 12 bits each, two
# in three bytes. All chunks but the last are of one length, so the size follows from the count
# alone. The form is that of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): chunks of 4,096, 12 +
# 2 bits.
#
# Values in 2 bits are a sign and one of two magnitudes, `scale` and `3 * scale`: the larger one for
# magnitudes of at least the mean of the chunk. `scale` is a least-squares fit, so the residual of
# the kept numbers is always shorter than they are: error feedback does not diverge.


class TopK(Codec):
    """Keeps `keep` numbers of each `chunk`, all of a shorter last chunk if it has no more.

    A tie goes to the lower index; NaN counts as infinite. `values` are `raw`, in the tensor's own
    type, or `two-bit`. Raises `RequestError` for a chunk or a k that 12 bits cannot index.
    """

    def __init__(self, keep: int, chunk: int = LARGEST_CHUNK, values: str = "raw") -> None:
        check_top_k({"k": keep, "chunk": chunk})
        self.keep, self.chunk, self.two_bit = keep, chunk, values == "two-bit"

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        return compressed.top_k_bytes(count, itemsize, self.keep, self.chunk, two_bit=self.two_bit)

    def encode(self, flat: Tensor) -> Tensor:
        parts = [self._chosen(rows) for rows in self._rows(flat)]
        values = [rows.gather(1, at) for rows, at in zip(self._rows(flat), parts, strict=True)]
        indices = _packed_indices(torch.cat([at.flatten() for at in parts]) if parts else None)
        if self.two_bit:
            coded = [_two_bits(part) for part in values]
            scales = [scale for scale, _ in coded]
            codes = [code.flatten() for _, code in coded]
            pieces = [_bytes(torch.cat(scales)), _packed_codes(torch.cat(codes))] if coded else []
        else:
            pieces = [_bytes(torch.cat([part.flatten() for part in values]))] if values else []
        message = flat.new_zeros(
            self.size_bytes(flat.numel(), flat.element_size()), dtype=torch.uint8
        )
        if parts:
            used = torch.cat([*pieces, indices])
            message[: used.numel()] = used
        return message

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        count, chunks = kept_numbers(into.numel(), self.keep, self.chunk)
        if count == 0:
            return
        if self.two_bit:
            head = 4 * chunks
            scales = message[:head].view(torch.float32).to(into.dtype)
            after = head + -(-count // 4)
            values = _from_codes(message[head:after], count)
            values = values.to(into.dtype) * scales[self._chunk_of_each(into, count)]
        else:
            after = into.element_size() * count
            values = message[:after].view(into.dtype)
        within = _unpacked_indices(message[after : after + -(-count * 3 // 2)], count)
        at = within + self._chunk_of_each(into, count) * self.chunk
        into.index_add_(0, at, values, alpha=alpha)  # no index twice: one order of additions

    def _rows(self, flat: Tensor) -> list[Tensor]:
        """The whole chunks, (chunks, chunk), and the last part of the tensor, (1, length)."""
        whole = flat.numel() // self.chunk * self.chunk
        parts = [flat[:whole].view(-1, self.chunk), flat[whole:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def _chosen(self, rows: Tensor) -> Tensor:
        """The indices of the kept numbers of each row, (rows, k), ascending."""
        keep = min(self.keep, rows.shape[1])
        if keep == rows.shape[1]:
            return torch.arange(keep, device=rows.device).expand(rows.shape[0], keep)
        if (library := kernels(rows)) is not None:
            indices = torch.empty(rows.shape[0], keep, dtype=torch.int64)
            library.top_k(is_double(rows), rows.data_ptr(), *rows.shape, keep, indices.data_ptr())
            return indices
        size = rows.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        least = size.topk(keep, dim=1).values[:, -1:]
        above, equal = size > least, size == least
        free = keep - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1) <= free))
        return chosen.nonzero()[:, 1].view(-1, keep)

    def _chunk_of_each(self, flat: Tensor, count: int) -> Tensor:
        """The chunk of each kept number."""
        return torch.arange(count, device=flat.device) // self.keep


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _two_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each row, and codes: bit 0 a negative sign, bit 1 the larger magnitude."""
    size = values.abs()
    large = size >= size.mean(1, keepdim=True)
    weight = torch.where(large, 3.0, 1.0).to(values.dtype)
    scale = (weight * size).sum(1) / weight.square().sum(1)
    return scale.float(), (values < 0).to(torch.uint8) | large.to(torch.uint8) << 1


def _packed_codes(codes: Tensor) -> Tensor:
    """Four in a byte, the first one in the lowest bits."""
    four = torch.cat([codes, codes.new_zeros(-codes.numel() % 4)]).view(-1, 4)
    return four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6


def _from_codes(packed: Tensor, count: int) -> Tensor:
    """Signs and magnitudes in units of the scale, (count,), float32."""
    shifts = torch.arange(0, 8, 2, device=packed.device, dtype=torch.uint8)
    codes = ((packed[:, None] >> shifts) & 3).flatten()[:count]
    return torch.tensor([1.0, -1.0, 3.0, -3.0], device=packed.device)[codes.long()]


def _packed_indices(indices: Tensor | None) -> Tensor:
    """Two numbers below 4,096 in three bytes, low bits first; an odd last one in two bytes."""
    if indices is None:
        return torch.empty(0, dtype=torch.uint8)
    count = indices.numel()
    pair = torch.cat([indices, indices.new_zeros(count % 2)]).to(torch.int16).view(-1, 2)
    first, second = pair[:, 0], pair[:, 1]
    three = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 1)
    return three.to(torch.uint8).flatten()[: -(-count * 3 // 2)]


def _unpacked_indices(packed: Tensor, count: int) -> Tensor:
    """The indices in a result of `_packed_indices`, (count,), int64."""
    three = torch.cat([packed, packed.new_zeros(-packed.numel() % 3)]).view(-1, 3).long()
    first = three[:, 0] | (three[:, 1] & 15) << 8
    second = three[:, 1] >> 4 | three[:, 2] << 4
    return torch.stack([first, second], 1).flatten()[:count]


# --- named ---------------------------------------------------------------------------------------
# The codecs that `reduce=` names.


def codec_of(reduce: Picked) -> Codec:
    """The codec of `top-k` or `two-bit`, with its options."""
    options = reduce.options
    if reduce.name == "top-k":
        return TopK(options["k"], options["chunk"], options["values"])
    assert reduce.name == "two-bit"
    return TwoBit(options["threshold"])


class ErrorFeedback:
    """A `residual` of the shape of `like`, (n,), before `codec`. Nothing is communicated."""

    def __init__(self, codec: Codec, like: Tensor, decay: float = 1.0) -> None:
        self.codec, self.decay = codec, decay
        self.residual = torch.zeros_like(like)

    def encode(self, flat: Tensor) -> Tensor:
        """The message of `flat` plus the residual, uint8.

        Numbers that are not finite are sent once: the residual is zero there.
        """
        residual = self.residual
        if self.decay != 1:
            residual.mul_(self.decay)
        message = self.codec.encode(residual.add_(flat))
        self.codec.add_decoded(message, residual, alpha=-1)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return message
