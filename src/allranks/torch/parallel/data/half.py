"""Sums with 16 bits of each gradient on the wire: half the bytes of `mean`, and less rounding.

    1. every rank rounds its gradients to 16 bits, and sends chunk r of them to rank r
    2. rank r adds the chunks in float32, in rank order, rounds the sum to 16 bits, and sends it to
       all ranks

So a gradient is rounded twice, on any number of ranks. An all-reduce of 16-bit numbers would round
after every addition. All ranks get the same bits, and a plain loop over the gradients of the ranks
gives them too. float64 is rounded and added in the same way. A single rank sends nothing and rounds
nothing.

The tally (loss, weights, counts, moments of BatchNorm) is not rounded. A chunk of it, in its own
dtype, is at the head of every message, and is also added in rank order.

bf16 has the range of float32 and 8 bits of precision. fp16 has 11 bits. Values above 65,504 become
infinite on all ranks, and are handled as any bad step: by the loss scale under `--precision fp16`,
else by the guard. Values below 6e-8 become 0. Gradients are already divided by the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from allranks.strategies.shards import rows_of
from allranks.torch.accelerator import is_accelerator
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.model.reals import reals
from allranks.torch.parallel.data.buckets import ALIGNED_BYTES, grouped
from allranks.torch.parallel.data.reducer import Bucket, Reducer

WHOLE = 4  # 16-bit numbers: rows are multiples of 8 bytes, so a tally of any dtype is aligned


class Half(Reducer):
    """An all-to-all and an all-gather per bucket.
    Sends 2(N-1)/N of 2 bytes per gradient + tally."""

    def __init__(self, kind: torch.dtype, comm: Comm, shards: int) -> None:
        super().__init__(comm, shards)
        self.kind = kind
        self._exchanges: list[_HalfExchange] = []

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        ranks = self.comm.size
        self._exchanges.clear()
        for bucket in buckets:
            gradients = bucket.gradients
            tally = bucket.flat[gradients.numel() :]
            outgoing, received, total = (
                _rows(count, ranks, gradients, tally, self.kind) for count in (ranks, ranks, 1)
            )
            matches = [*_matching(gradients, outgoing.gradients), *_matching(tally, outgoing.tally)]
            self._exchanges.append(_HalfExchange(outgoing, received, total, matches))

    def exchange(self, bucket: int) -> Iterator[Pending]:
        if self.comm.size == 1:
            return
        exchange = self._exchanges[bucket]
        exchange.round()
        outgoing, received = exchange.outgoing.bytes, exchange.received.bytes
        sizes = [outgoing.shape[1]] * self.comm.size
        yield self.comm.all_to_all(received.view(-1), outgoing.view(-1), sizes, sizes)
        exchange.add()
        yield self.comm.all_gather(outgoing.view(-1), exchange.total.bytes.view(-1))
        exchange.unpack()


fp16 = partial(Half, torch.float16)
bf16 = partial(Half, torch.bfloat16)


@dataclass(frozen=True)
class _HalfRows:
    """Messages, a row of bytes each: a part of the unrounded tally, then 16-bit gradients."""

    bytes: Tensor  # (row, bytes)
    tally: Tensor  # (row, part of the tally)
    gradients: Tensor  # (row, part of the gradients)


def _rows(count: int, ranks: int, gradients: Tensor, tally: Tensor, kind: torch.dtype) -> _HalfRows:
    """`count` rows of zeros, each with room for one part in `ranks` of a bucket."""
    head = -(-tally.numel() // ranks) * tally.element_size()
    part = -(-gradients.numel() // (ranks * WHOLE)) * WHOLE
    rows = gradients.new_zeros((count, head + part * kind.itemsize), dtype=torch.uint8)
    return _HalfRows(rows, rows[:, :head].view(tally.dtype), rows[:, head:].view(kind))


def _matching(values: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views: parts of `values`, (n,), and the parts of `rows` that they fill in order."""
    if values.numel() == 0:
        return []
    full, remainder = divmod(values.numel(), rows.shape[1])
    whole = values[: values.numel() - remainder]
    pairs = [(whole.view(full, -1), rows[:full])] if full else []
    return [*pairs, (values[whole.numel() :], rows[full, :remainder])] if remainder else pairs


@dataclass(frozen=True)
class _HalfExchange:
    """One bucket in flight. `outgoing` is reused for the sums of all ranks after it was sent."""

    outgoing: _HalfRows
    received: _HalfRows
    total: _HalfRows
    matches: list[tuple[Tensor, Tensor]]

    def round(self) -> None:
        """Copy the bucket into the outgoing rows; this rounds the gradients."""
        for values, row in self.matches:
            row.copy_(values)

    def add(self) -> None:
        """Sum this rank's chunk over all ranks, in rank order."""
        total = self.received.gradients[0].float()
        for gradients in self.received.gradients[1:]:
            total.add_(gradients)
        self.total.gradients[0].copy_(total)
        tally = self.total.tally[0].copy_(self.received.tally[0])
        for part in self.received.tally[1:]:
            tally.add_(part)

    def unpack(self) -> None:
        """Copy the sums back into the bucket."""
        for values, row in self.matches:
            values.copy_(row)


# --- packed --------------------------------------------------------------------------------------
# Parameters packed by rank, for a reduce-scatter of gradients and an all-gather of weights.
#
# A packed bucket is (ranks, section). Row r holds the rows of each parameter that rank r owns, cut
# along dimension 0 as torch.chunk does, each padded to the largest cut. So one reduce-scatter of a
# bucket gives every rank its rows of the summed gradients, and one all-gather of updated rows
# restores the full weights. A large parameter with evenly cut rows is a bucket of its own: its
# memory has this layout already, and nothing is copied.
# Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054.


Pair = tuple[Tensor, Tensor]
"""The target and the source of a copy."""
ALONE_BYTES = 2**20  # from here on the bytes of a message cost more than its latency
PADDED_BYTES = 2**16  # up to here two copies of an uneven tensor are faster on a CPU than views


def own_rows(tensor: Tensor, ranks: int, rank: int) -> Tensor:
    """The rows of a tensor that `rank` owns: a view."""
    rows = rows_of(tensor.shape[0], ranks, rank)
    return tensor[rows.start : rows.stop]


def _memory_of(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class OwnRows:
    """This rank's rows of each parameter, by `cut`: views, made once for the same memory."""

    def __init__(self, parameters: list[nn.Parameter], cut: Callable[[Tensor], Tensor]) -> None:
        self.parameters, self.cut = parameters, cut
        self.whole: list[Tensor] = []
        self.rows: list[Tensor] = []
        self._memory: list[Any] = []

    def refresh(self) -> bool:
        """Update the views; returns whether the memory of a parameter has changed."""
        pairs = zip(self.parameters, self._memory, strict=False)
        if self._memory and all(_memory_of(p) == known for p, known in pairs):
            return False
        self._memory = [_memory_of(parameter) for parameter in self.parameters]
        self.whole = [parameter.data for parameter in self.parameters]
        self.rows = [self.cut(whole) for whole in self.whole]
        return True


def packed_buckets(
    parameters: list[nn.Parameter], bucket_bytes: int, ranks: int
) -> tuple[list[PackedBucket], list[int]]:
    """Buckets in the order in which backward finishes them, and the bucket of each parameter."""
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
    """Copy with as few kernel launches as a foreach needs."""
    some = [pair for pair in pairs if pair[0].numel()]
    if some:
        torch._foreach_copy_([to for to, _ in some], [source for _, source in some])


@dataclass(frozen=True)
class SectionPlace:
    """The place of a parameter of this shape in each section, in real numbers.

    The first `full` ranks have `chunk` rows of it each, and the next one has `more`, perhaps 0.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    chunk: int
    full: int
    more: int

    @property
    def numbers(self) -> int:
        """How many of its numbers the rank with the most rows has."""
        return self.chunk * self.strides[0]

    def rows(self, rank: int) -> tuple[int, ...]:
        """The shape of its part in the section of `rank`."""
        rows = max(0, min(self.chunk, self.shape[0] - rank * self.chunk))
        return rows, *self.shape[1:]

    def pairs(self, flat: Tensor, section: int, whole: Tensor) -> list[Pair]:
        """Pairs of its parts in sections of that size and its rows in `whole`: at most two."""
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


def _place(shape: tuple[int, ...], start: int, ranks: int) -> SectionPlace:
    chunk = len(rows_of(shape[0], ranks, 0))
    full, more = divmod(shape[0], chunk) if chunk else (0, 0)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return SectionPlace(shape, strides, start, chunk, full, more)


class PackedBucket:
    """Some parameters of one dtype, on so many `ranks`. All of them have rows.

    There is no Python loop over ranks: a parameter is one column of all sections, and all columns
    are copied by one kernel launch each way. A CPU copies large, unevenly cut tensors one by one,
    so as not to copy them twice.
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
        uneven = [t.nbytes for t in real if not _is_cut_evenly(t, ranks)]
        self._is_small = max(uneven, default=0) <= PADDED_BYTES
        self._is_complex = [parameter.is_complex() for parameter in parameters]
        self._rows: dict[int, list[tuple[int, ...]]] = {}  # by rank, the shapes in its section
        self.forget()

    def forget(self) -> None:
        """Drop the views of the parameters, whose memory has changed."""
        self._columns: list[Tensor | None] = []
        self._owned: dict[int, list[Tensor]] = {}  # by rank, the pieces of its section

    @property
    def nbytes(self) -> int:
        """The bytes of the whole bucket, with padding."""
        return self.ranks * self.section * self.dtype.itemsize

    def packed(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A flat tensor of these, which may share their memory; zeros for a tensor that is
        `None`."""
        if self.is_alone and (only := tensors[0]) is not None and only.is_contiguous():
            return reals(only.detach()).view(-1)
        whole = [None if tensor is None else self._dense(tensor) for tensor in tensors]
        if self._is_small or is_accelerator(self.device):
            return self.packed_at_once(whole)
        return self.packed_one_by_one(whole)

    @torch.no_grad()
    def packed_one_by_one(self, whole: Sequence[Tensor | None]) -> Tensor:
        """The same for dense tensors, each copied once."""
        flat = torch.zeros(self.ranks * self.section, dtype=self.dtype, device=self.device)
        pairs: list[Pair] = []
        for place, tensor in zip(self.places, whole, strict=True):
            if tensor is not None:
                pairs += place.pairs(flat, self.section, tensor)
        _copy_all(pairs)
        return flat

    @torch.no_grad()
    def packed_at_once(self, whole: Sequence[Tensor | None]) -> Tensor:
        """The same for dense tensors in one kernel launch, which also writes the padding."""
        flat = torch.empty(self.ranks * self.section, dtype=self.dtype, device=self.device)
        zeros = self._gaps(flat.new_zeros(self.ranks * self._largest_gap))
        pieces: list[Tensor] = []
        for place, tensor, gap in zip(self.places, whole, self._sizes[1::2], strict=True):
            if place.numbers:  # a device copies memory linearly, whatever the strides
                there = flat.new_zeros(place.shape) if tensor is None else tensor.contiguous()
                pieces.append(there)
            if gap:
                pieces.append(zeros[gap])
        if pieces:
            torch._chunk_cat(pieces, 0, self.ranks, out=flat.view(self.ranks, self.section))
        return flat

    def room(self) -> Tensor:
        """An empty flat tensor for the sections of all ranks, for `unpack`."""
        if self.is_alone:
            return reals(self.parameters[0].detach()).view(-1)
        return torch.empty(self.ranks * self.section, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def unpack(self, flat: Tensor) -> None:
        """Copy the rows in `flat`, laid out as by `packed`, into the full
        parameters."""
        if self.is_alone:
            return
        if self._is_small or is_accelerator(self.device):
            self.unpack_at_once(flat)
        else:
            self.unpack_one_by_one(flat)

    @torch.no_grad()
    def unpack_one_by_one(self, flat: Tensor) -> None:
        """The same, each copied once."""
        pairs: list[Pair] = []
        for place, whole in zip(self.places, self._whole(), strict=True):
            pairs += place.pairs(flat, self.section, whole)
        _copy_all([(into, source) for source, into in pairs])

    @torch.no_grad()
    def unpack_at_once(self, flat: Tensor) -> None:
        """The same in one kernel launch, and some more for unevenly cut parameters."""
        self._columns = self._columns or [
            self._column(*pair) for pair in zip(self.places, self._whole(), strict=True)
        ]
        spare = self._gaps(flat.new_empty(self.ranks * self._largest_gap))
        sizes: list[int] = []
        columns: list[Tensor] = []
        alike: list[Pair] = []
        permuted: list[Pair] = []
        gaps = self._sizes[1::2]
        for at, (place, column, gap) in enumerate(
            zip(self.places, self._columns, gaps, strict=True)
        ):
            if column is None:
                whole = reals(self.parameters[at].detach())
                column = flat.new_empty(self.ranks, place.numbers)
                rows = column.view(-1)[: whole.numel()].view(place.shape)
                (alike if whole.is_contiguous() else permuted).append((whole, rows))
            sizes.append(place.numbers)
            columns.append(column)
            if gap:
                sizes.append(gap)
                columns.append(spare[gap])
        sections = flat.view(self.ranks, self.section)
        torch.split_with_sizes_copy(sections, sizes, dim=1, out=columns)
        _copy_all(alike)
        _copy_all(permuted)

    def _column(self, place: SectionPlace, whole: Tensor) -> Tensor | None:
        """The memory of a parameter as a column of all sections, if its layout allows."""
        if whole.is_contiguous() and whole.numel() == self.ranks * place.numbers:
            return whole.view(self.ranks, place.numbers)
        return None

    @torch.no_grad()
    def section_of(self, rank: int) -> Tensor:
        """A section with the rows of `rank` of the full parameters."""
        if self.is_alone:
            return own_rows(self.room().view(self.ranks, -1), self.ranks, rank).view(-1)
        if rank not in self._owned:
            self._owned[rank] = self._pieces_of(rank)
        section = torch.empty(self.section, dtype=self.dtype, device=self.device)
        pieces = [p if p.ndim == 1 else p.reshape(-1) for p in self._owned[rank]]
        torch.cat(pieces, out=section)
        return section

    def _pieces_of(self, rank: int) -> list[Tensor]:
        """The pieces of the section of `rank`, in order: its rows, and zeros as padding."""
        pieces: list[Tensor] = []
        room = self._sizes[::2], self._sizes[1::2]
        most = max(numbers + gap for numbers, gap in zip(*room, strict=True))
        zeros = torch.zeros(most, dtype=self.dtype, device=self.device)
        for whole, numbers, gap in zip(self._whole(), *room, strict=True):
            rows = own_rows(whole, self.ranks, rank)
            pieces.append(rows.view(-1) if rows.is_contiguous() else rows)
            if padding := numbers + gap - rows.numel():
                pieces.append(zeros[:padding])
        return pieces

    def parts(self, section: Tensor, rank: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with a view of its part in the section of `rank`."""
        if rank not in self._rows:
            self._rows[rank] = [place.rows(rank) for place in self.places]
        start = section.storage_offset()
        each = zip(self.parameters, self.places, self._rows[rank], self._is_complex, strict=True)
        for parameter, place, rows, is_complex in each:
            part = section.as_strided(rows, place.strides, start + place.start)
            yield parameter, torch.view_as_complex(part) if is_complex else part

    def _gaps(self, memory: Tensor) -> dict[int, Tensor]:
        """By width, views of `memory` for the gaps of all sections."""
        widths = {*self._sizes[1::2]}
        return {n: memory[: self.ranks * n].view(self.ranks, n) for n in widths}

    def _whole(self) -> Iterator[Tensor]:
        """Every parameter as real numbers."""
        return (reals(parameter.detach()) for parameter in self.parameters)

    def _dense(self, tensor: Tensor) -> Tensor:
        """A gradient as dense real numbers of the dtype of the bucket."""
        if tensor.dtype is self.dtype and not tensor.is_sparse:
            return tensor
        real = reals(tensor.to_dense() if tensor.is_sparse else tensor.detach())
        return real if real.dtype is self.dtype else real.to(self.dtype)
