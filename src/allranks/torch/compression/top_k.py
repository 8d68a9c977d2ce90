"""Of each chunk of a flat tensor the k largest numbers: where they are, in 12 bits, and what.

A chunk has at most 4,096 numbers, so a place in it takes 12 bits: two places are three bytes.
Numbers go as they are, or in 2 bits with one scale for the chunk, the largest magnitude s: the
sign, and whether s/3 or s stands for the magnitude. The last chunk may be shorter. SparseLoCo,
arXiv 2508.15706, keeps 64 of 4,096.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_CHUNK = 4096


@dataclass(frozen=True)
class TopK:
    """Keeps `keep` numbers of each `chunk`, in `bits`: 2, or 0 for as many as they have."""

    chunk: int = LARGEST_CHUNK
    keep: int = 64
    bits: int = 2

    def size_bytes(self, count: int, item_bytes: int = 4) -> int:
        """How many bytes stand for `count` numbers of so many bytes each."""
        chunks, _, kept = self._shape(count)
        places = _half_more(chunks * kept)
        if self.bits == 2:
            return places + -(-chunks * kept // 4) + chunks * item_bytes
        return places + chunks * kept * item_bytes

    def _shape(self, count: int) -> tuple[int, int, int]:
        """How many chunks, how long each is, and how many numbers are kept of it."""
        width = max(1, min(self.chunk, count))
        return -(-count // width), width, min(self.keep, width)

    def encode(self, flat: Tensor) -> Tensor:
        """The message for a flat tensor, (bytes,) of uint8. A tie goes to the lower place."""
        chunks, width, kept = self._shape(flat.numel())
        missing = chunks * width - flat.numel()
        rows = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        rows = rows.view(chunks, width)
        places = _largest(rows, kept, missing)
        values = rows.gather(1, places)
        if self.bits == 2:
            scale = values.abs().amax(1, keepdim=True)
            is_large = values.abs() * 3 >= 2 * scale
            codes = is_large.to(torch.uint8) + 2 * (values < 0).to(torch.uint8)
            return torch.cat([_packed_places(places), _packed_codes(codes), _bytes(scale)])
        return torch.cat([_packed_places(places), _bytes(values)])

    def add_decoded(self, message: Tensor, into: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times what a message stands for to a flat tensor."""
        chunks, width, kept = self._shape(into.numel())
        count = chunks * kept
        end = _half_more(count)
        places = _places(message[:end], count).view(chunks, kept)
        if self.bits == 2:
            middle = end + -(-count // 4)
            codes = _codes(message[end:middle], count).view(chunks, kept)
            scale = _numbers(message[middle:], into.dtype).view(chunks, 1)
            levels = torch.tensor([1 / 3, 1.0, -1 / 3, -1.0], dtype=into.dtype, device=into.device)
            values = (levels[codes] * scale).flatten()
        else:
            values = _numbers(message[end:], into.dtype)
        starts = torch.arange(0, chunks * width, width, device=into.device)[:, None]
        where = (places + starts).flatten()
        if chunks * width > into.numel():  # a short last chunk may have fewer than are kept
            is_there = where < into.numel()
            where, values = where[is_there], values[is_there]
        into.index_add_(0, where, values, alpha=factor)


def _largest(rows: Tensor, kept: int, missing: int) -> Tensor:
    """The places of the `kept` largest magnitudes of each row, from left to right."""
    sizes = rows.abs()
    if missing:
        sizes[-1, -missing:] = -1
    least = sizes.topk(kept, sorted=True).values[:, -1:]
    chosen = sizes >= least
    if int(chosen.sum()) > kept * len(rows):  # of equal ones the first
        equal = sizes == least
        free = kept - (sizes > least).sum(1, keepdim=True)
        chosen &= ~equal | (equal.cumsum(1) <= free)
    return chosen.nonzero()[:, 1].view(-1, kept)


def _half_more(count: int) -> int:
    """The bytes of so many places."""
    return -(-count // 2) * 3


def _packed_places(places: Tensor) -> Tensor:
    flat = places.flatten()
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    first, second = flat.view(-1, 2).unbind(1)
    parts = (first >> 4, (first & 15) << 4 | second >> 8, second & 255)
    return torch.stack(parts, 1).flatten().to(torch.uint8)


def _places(packed: Tensor, count: int) -> Tensor:
    one, two, three = packed.view(-1, 3).to(torch.int64).unbind(1)
    return torch.stack((one << 4 | two >> 4, (two & 15) << 8 | three), 1).flatten()[:count]


SHIFTS = (6, 4, 2, 0)  # the first of four codes stands in the highest bits


def _packed_codes(codes: Tensor) -> Tensor:
    flat = codes.flatten()
    if missing := -flat.numel() % 4:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    shifts = torch.tensor(SHIFTS, dtype=torch.uint8, device=flat.device)
    return (flat.view(-1, 4) << shifts).sum(1).to(torch.uint8)


def _codes(packed: Tensor, count: int) -> Tensor:
    shifts = torch.tensor(SHIFTS, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 3).flatten()[:count].to(torch.int64)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(-1).view(torch.uint8)


def _numbers(message: Tensor, kind: torch.dtype) -> Tensor:
    return message.clone().view(kind)  # memory that begins where such numbers may
