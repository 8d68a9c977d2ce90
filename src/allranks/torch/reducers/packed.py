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
        torch._foreach_copy_([to for to, _ in some], [found for _, found in some])


@dataclass(frozen=True)
class Place:
    """Where a parameter of this shape stands in each section, in real numbers."""

    shape: tuple[int, ...]
    start: int

    def rows(self, section: Tensor, ranks: int, rank: int) -> Tensor:
        """Its rows in the section of `rank`: a view."""
        rows = len(rows_of(self.shape[0], ranks, rank))
        shape = (rows, *self.shape[1:])
        return section[self.start : self.start + math.prod(shape)].view(shape)


class PackedBucket:
    """Some parameters of one type, on so many `ranks`. All of them have rows."""

    def __init__(self, parameters: list[nn.Parameter], ranks: int) -> None:
        self.parameters, self.ranks = parameters, ranks
        real = [reals(parameter.detach()) for parameter in parameters]
        self.dtype, self.device = real[0].dtype, real[0].device
        self.is_alone = len(real) == 1 and _is_cut_evenly(real[0], ranks)
        unit = 1 if self.is_alone else ALIGNED_BYTES // real[0].element_size()
        self.places, self.section = [], 0
        for tensor in real:
            self.places.append(Place(tuple(tensor.shape), self.section))
            most = len(rows_of(tensor.shape[0], ranks, 0)) * math.prod(tensor.shape[1:])
            self.section += -(-most // unit) * unit

    @property
    def nbytes(self) -> int:
        """The bytes of the whole bucket, padding and all."""
        return self.ranks * self.section * self.dtype.itemsize

    def packed(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A flat tensor that holds these, whose memory may be theirs; zeros for one that is not
        there."""
        if self.is_alone and (only := tensors[0]) is not None and only.is_contiguous():
            return reals(only.detach()).view(-1)
        flat = torch.zeros(self.ranks * self.section, dtype=self.dtype, device=self.device)
        sections = flat.view(self.ranks, self.section)
        pairs: list[Pair] = []
        for place, tensor in zip(self.places, tensors, strict=True):
            if tensor is None:
                continue
            dense = reals(tensor.to_dense() if tensor.is_sparse else tensor.detach())
            for rank, section in enumerate(sections):
                own = own_rows(dense, self.ranks, rank)
                pairs.append((place.rows(section, self.ranks, rank), own))
        _copy_all(pairs)
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
        pairs: list[Pair] = []
        for rank, section in enumerate(flat.view(self.ranks, self.section)):
            for place, parameter in zip(self.places, self.parameters, strict=True):
                own = own_rows(reals(parameter.detach()), self.ranks, rank)
                pairs.append((own, place.rows(section, self.ranks, rank)))
        _copy_all(pairs)

    def section_of(self, rank: int) -> Tensor:
        """A section that holds the rows of `rank` of the parameters, all whole."""
        if self.is_alone:
            return own_rows(self.room().view(self.ranks, -1), self.ranks, rank).view(-1)
        section = torch.zeros(self.section, dtype=self.dtype, device=self.device)
        pairs: list[Pair] = []
        for place, parameter in zip(self.places, self.parameters, strict=True):
            own = own_rows(reals(parameter.detach()), self.ranks, rank)
            pairs.append((place.rows(section, self.ranks, rank), own))
        _copy_all(pairs)
        return section

    def parts(self, section: Tensor, rank: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with what the section of `rank` holds for it: a view."""
        for place, parameter in zip(self.places, self.parameters, strict=True):
            part = place.rows(section, self.ranks, rank)
            yield parameter, torch.view_as_complex(part) if parameter.is_complex() else part
