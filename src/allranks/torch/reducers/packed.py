"""Parameters packed rank by rank: what a reduce-scatter gives out, and an all-gather brings back.

A packed bucket is (ranks, section): row r holds, one after another, the rows of each parameter that
rank r owns, cut along dimension 0 as torch.chunk does, each padded to the largest cut. So one
reduce-scatter of a bucket leaves every rank with its own rows of the summed gradients, and one
all-gather of updated rows makes the weights whole again. A large parameter whose rows are cut
evenly is a bucket of its own: its memory is laid out so already, and nothing is copied.
Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from allranks.strategies.shards import rows_of
from allranks.torch.accelerator import is_accelerator
from allranks.torch.model.reals import reals
from allranks.torch.reducers.buckets import ALIGNED_BYTES, grouped

Pair = tuple[Tensor, Tensor]
"""Where numbers go, and where they come from."""
ALONE_BYTES = 2**20  # from here on a message costs more by its bytes than by its number


def own_rows(tensor: Tensor, ranks: int, rank: int) -> Tensor:
    """The rows of a tensor that `rank` owns: a view."""
    rows = rows_of(tensor.shape[0], ranks, rank)
    return tensor[rows.start : rows.stop]


def packed_buckets(
    parameters: list[nn.Parameter], bucket_bytes: int, ranks: int
) -> tuple[list[PackedBucket], list[int]]:
    """Buckets in the order in which backward finishes them, and in which each parameter lies."""
    buckets: list[PackedBucket] = []
    bucket_of = [0] * len(parameters)
    for group in grouped(parameters, bucket_bytes):
        large = [i for i in group if _goes_alone(parameters[i], ranks)]
        small = [i for i in group if i not in large]
        for positions in (*([i] for i in large), *([small] if small else [])):
            for position in positions:
                bucket_of[position] = len(buckets)
            buckets.append(PackedBucket([parameters[i] for i in positions], ranks))
    return buckets, bucket_of


def _goes_alone(parameter: Tensor, ranks: int) -> bool:
    return parameter.nbytes >= ALONE_BYTES and _is_cut_evenly(parameter, ranks)


def _is_cut_evenly(tensor: Tensor, ranks: int) -> bool:
    return tensor.is_contiguous() and tensor.shape[0] % ranks == 0


def _copy_all(pairs: Sequence[Pair]) -> None:
    """In as few launches as a list takes, however many tensors there are."""
    some = [pair for pair in pairs if pair[0].numel()]
    if some:
        torch._foreach_copy_([to for to, _ in some], [source for _, source in some])


@dataclass(frozen=True)
class Place:
    """Where a parameter of this shape stands in each section, in real numbers.

    The first `full` ranks have `chunk` rows of it each, and the next one `more`, which may be none.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    chunk: int
    full: int
    more: int

    @property
    def numbers(self) -> int:
        """How many numbers of it the rank with the most rows has."""
        return self.chunk * self.strides[0]

    def rows(self, section: Tensor, rank: int) -> Tensor:
        """Its rows in the section of `rank`: a view."""
        rows = max(0, min(self.chunk, self.shape[0] - rank * self.chunk))
        at = section.storage_offset() + self.start
        return section.as_strided((rows, *self.shape[1:]), self.strides, at)

    def pairs(self, flat: Tensor, section: int, whole: Tensor) -> list[Pair]:
        """What stands in all sections of so many numbers, with its rows in `whole`: at most two."""
        end, at, pairs = self.full * self.chunk, flat.storage_offset() + self.start, []
        if self.full:
            shape = self.full, self.chunk, *self.shape[1:]
            column = flat.as_strided(shape, (section, *self.strides), at)
            pairs.append((column, (whole[:end] if self.more else whole).view(shape)))
        if self.more:
            shape = self.more, *self.shape[1:]
            rows = flat.as_strided(shape, self.strides, at + self.full * section)
            pairs.append((rows, whole[end:]))
        return pairs


def _place(shape: tuple[int, ...], start: int, ranks: int) -> Place:
    chunk = len(rows_of(shape[0], ranks, 0))
    full, more = divmod(shape[0], chunk) if chunk else (0, 0)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Place(shape, strides, start, chunk, full, more)


class PackedBucket:
    """Some parameters of one type, on so many `ranks`. All of them have rows.

    No call of Python is made for a rank: a parameter is one column of all sections, and what a
    device copies for all columns together is one launch each way.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: int) -> None:
        self.parameters, self.ranks = parameters, ranks
        real = [reals(parameter.detach()) for parameter in parameters]
        self.dtype, self.device = real[0].dtype, real[0].device
        self.is_alone = len(real) == 1 and _is_cut_evenly(real[0], ranks)
        unit = 1 if self.is_alone else ALIGNED_BYTES // real[0].element_size()
        self.places, self.section = [], 0
        self._sizes: list[int] = []  # of each column, and of the gap after it
        for tensor in real:
            place = _place(tuple(tensor.shape), self.section, ranks)
            room = -(-place.numbers // unit) * unit
            self.places.append(place)
            self._sizes += [place.numbers, room - place.numbers]
            self.section += room
        self._largest_gap = max(self._sizes[1::2])

    @property
    def nbytes(self) -> int:
        """The bytes of the whole bucket, padding and all."""
        return self.ranks * self.section * self.dtype.itemsize

    def packed(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A flat tensor that holds these, whose memory may be theirs; zeros for one that is not
        there."""
        if self.is_alone and (only := tensors[0]) is not None and only.is_contiguous():
            return reals(only.detach()).view(-1)
        whole = [None if tensor is None else self._dense(tensor) for tensor in tensors]
        if is_accelerator(self.device):
            return self.packed_at_once(whole)
        flat = torch.zeros(self.ranks * self.section, dtype=self.dtype, device=self.device)
        pairs: list[Pair] = []
        for place, tensor in zip(self.places, whole, strict=True):
            if tensor is not None:
                pairs += place.pairs(flat, self.section, tensor)
        _copy_all(pairs)
        return flat

    def packed_at_once(self, whole: Sequence[Tensor | None]) -> Tensor:
        """The same of dense ones in one launch, which writes the padding too."""
        flat = torch.empty(self.ranks * self.section, dtype=self.dtype, device=self.device)
        zeros = self._gaps(flat.new_zeros(self.ranks * self._largest_gap))
        pieces: list[Tensor] = []
        for place, tensor, gap in zip(self.places, whole, self._sizes[1::2], strict=True):
            if place.numbers:  # a device reads memory as it lies, whatever the strides
                there = flat.new_zeros(place.shape) if tensor is None else tensor.contiguous()
                pieces.append(there)
            if gap:
                pieces.append(zeros[gap])
        if pieces:
            torch._chunk_cat(pieces, 0, self.ranks, out=flat.view(self.ranks, self.section))
        return flat

    def room(self) -> Tensor:
        """A flat tensor for the sections of all ranks, to be `unpack`ed."""
        if self.is_alone:
            return reals(self.parameters[0].detach()).view(-1)
        return torch.empty(self.ranks * self.section, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def unpack(self, flat: Tensor) -> None:
        """Write rows that stand in `flat`, as `packed` puts them, into the parameters, all
        whole."""
        if self.is_alone:
            return
        if is_accelerator(self.device):
            self.unpack_at_once(flat)
            return
        pairs: list[Pair] = []
        for place, whole in zip(self.places, self._whole(), strict=True):
            pairs += place.pairs(flat, self.section, whole)
        _copy_all([(into, source) for source, into in pairs])

    @torch.no_grad()
    def unpack_at_once(self, flat: Tensor) -> None:
        """The same in one launch, and some for parameters that are not cut evenly."""
        spare = self._gaps(flat.new_empty(self.ranks * self._largest_gap))
        columns: list[Tensor] = []
        alike: list[Pair] = []
        turned: list[Pair] = []
        for place, whole, gap in zip(self.places, self._whole(), self._sizes[1::2], strict=True):
            if whole.is_contiguous() and whole.numel() == self.ranks * place.numbers:
                column = whole.view(self.ranks, place.numbers)
            else:
                column = flat.new_empty(self.ranks, place.numbers)
                rows = column.view(-1)[: whole.numel()].view(place.shape)
                (alike if whole.is_contiguous() else turned).append((whole, rows))
            columns += [column, spare[gap]]
        torch.split_with_sizes_copy(
            flat.view(self.ranks, self.section), self._sizes, dim=1, out=columns
        )
        _copy_all(alike)
        _copy_all(turned)

    def section_of(self, rank: int) -> Tensor:
        """A section that holds the rows of `rank` of the parameters, all whole."""
        if self.is_alone:
            return own_rows(self.room().view(self.ranks, -1), self.ranks, rank).view(-1)
        section = torch.zeros(self.section, dtype=self.dtype, device=self.device)
        pairs: list[Pair] = []
        for place, whole in zip(self.places, self._whole(), strict=True):
            part, start = place.rows(section, rank), rank * place.chunk
            pairs.append((part, whole[start : start + part.shape[0]]))
        _copy_all(pairs)
        return section

    def parts(self, section: Tensor, rank: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with what the section of `rank` holds for it: a view."""
        for place, parameter in zip(self.places, self.parameters, strict=True):
            part = place.rows(section, rank)
            yield parameter, torch.view_as_complex(part) if parameter.is_complex() else part

    def _gaps(self, memory: Tensor) -> dict[int, Tensor]:
        """By their width, what stands in the gaps of all sections: parts of one `memory`."""
        widths = {*self._sizes[1::2]}
        return {n: memory[: self.ranks * n].view(self.ranks, n) for n in widths}

    def _whole(self) -> Iterator[Tensor]:
        """Every parameter as real numbers."""
        return (reals(parameter.detach()) for parameter in self.parameters)

    def _dense(self, tensor: Tensor) -> Tensor:
        """A gradient as real numbers of the type of the bucket."""
        real = reals(tensor.to_dense() if tensor.is_sparse else tensor.detach())
        return real if real.dtype is self.dtype else real.to(self.dtype)
