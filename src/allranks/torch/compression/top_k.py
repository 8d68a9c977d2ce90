"""Chunked top-k: of every chunk of a tensor the k numbers of largest magnitude, and where they are.

A message is, one after another: the values, chunk by chunk, in the order of their indices; with
values in 2 bits, then a scale for each chunk; and the indices in their chunks, 12 bits each, two
in three bytes. All chunks but the last are of one length, so the size follows from the count alone.
The form is that of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): chunks of 4,096, 12 + 2 bits.

Values in 2 bits are a sign and one of two magnitudes, `scale` and `3 * scale`, the larger one
where a magnitude is at least the mean of its chunk's. `scale` is that of least squares, so what is
left of the kept numbers is always shorter than they were: error feedback does not diverge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.strategies.reductions import compressed
from allranks.strategies.reductions.compressed import LARGEST_CHUNK, check_top_k, kept
from allranks.torch.compression.base import Codec
from allranks.torch.compression.kernels import is_double, kernels


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
            sent = [_bytes(torch.cat(scales)), _packed_codes(torch.cat(codes))] if coded else []
        else:
            sent = [_bytes(torch.cat([part.flatten() for part in values]))] if values else []
        message = flat.new_zeros(
            self.size_bytes(flat.numel(), flat.element_size()), dtype=torch.uint8
        )
        if parts:
            found = torch.cat([*sent, indices])
            message[: found.numel()] = found
        return message

    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        count, chunks = kept(into.numel(), self.keep, self.chunk)
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
        """The whole chunks, (chunks, chunk), and the rest of the tensor, (1, rest)."""
        whole = flat.numel() // self.chunk * self.chunk
        parts = [flat[:whole].view(-1, self.chunk), flat[whole:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def _chosen(self, rows: Tensor) -> Tensor:
        """Indices of what is kept of each row, (rows, k), ascending."""
        keep = min(self.keep, rows.shape[1])
        if keep == rows.shape[1]:
            return torch.arange(keep, device=rows.device).expand(rows.shape[0], keep)
        if (library := kernels(rows)) is not None:
            found = torch.empty(rows.shape[0], keep, dtype=torch.int64)
            library.top_k(is_double(rows), rows.data_ptr(), *rows.shape, keep, found.data_ptr())
            return found
        size = rows.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        least = size.topk(keep, dim=1).values[:, -1:]
        above, equal = size > least, size == least
        free = keep - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1) <= free))
        return chosen.nonzero()[:, 1].view(-1, keep)

    def _chunk_of_each(self, flat: Tensor, kept: int) -> Tensor:
        """In which chunk each number that is kept is."""
        return torch.arange(kept, device=flat.device) // self.keep


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
    """Two numbers below 4,096 in three bytes, low bits first; of an odd last one two bytes."""
    if indices is None:
        return torch.empty(0, dtype=torch.uint8)
    count = indices.numel()
    pair = torch.cat([indices, indices.new_zeros(count % 2)]).to(torch.int16).view(-1, 2)
    first, second = pair[:, 0], pair[:, 1]
    three = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 1)
    return three.to(torch.uint8).flatten()[: -(-count * 3 // 2)]


def _unpacked_indices(packed: Tensor, count: int) -> Tensor:
    """What `_packed_indices` was given, (count,), int64."""
    three = torch.cat([packed, packed.new_zeros(-packed.numel() % 3)]).view(-1, 3).long()
    first = three[:, 0] | (three[:, 1] & 15) << 8
    second = three[:, 1] >> 4 | three[:, 2] << 4
    return torch.stack([first, second], 1).flatten()[:count]
