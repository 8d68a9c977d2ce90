"""Which server has which weights, and their layout in its memory.

A tensor of `bound` numbers or more is cut into one piece for each server, of equal size up to
rounding (as MXNet's kvstore does from 10^6 numbers on). Each other tensor goes, in the order of the
model, to the first server with the fewest bytes so far (TensorFlow's greedy load balancing). A
tensor whose optimizer needs it whole is not cut.

The pieces of one server are contiguous in memory, which is sent, summed and updated as a whole:

    | numbers of the first type, piece by piece | pad to 64 bytes | numbers of the second type | …

All processes compute the same layout, so a message is these bytes and needs no names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from allranks.launcher.nodes.channel import Message

MOST_NUMBERS = 1_000_000


@dataclass(frozen=True)
class WeightPiece:
    """The numbers `start` to `stop` - 1 of the tensor at `position`, and their server.

    `is_whole`: the piece is the whole tensor.
    """

    position: int
    start: int
    stop: int
    server: int
    is_whole: bool

    @property
    def numbers(self) -> int:
        return self.stop - self.start


def placed(
    tensors: Sequence[Tensor],
    servers: int,
    bound: int = MOST_NUMBERS,
    whole: Collection[int] = (),
) -> list[WeightPiece]:
    """The pieces of all tensors, in their order; the tensors at the positions `whole` are not cut.

    A tensor with fewer numbers than there are servers is not cut either.
    """
    load, pieces = [0] * servers, dict[int, list[WeightPiece]]()
    cut = [
        at
        for at, tensor in enumerate(tensors)
        if servers > 1 and at not in whole and tensor.numel() >= max(bound, servers)
    ]
    for at in cut:
        pieces[at] = cut_evenly(at, tensors[at].numel(), servers)
        for piece in pieces[at]:
            load[piece.server] += piece.numbers * tensors[at].itemsize
    for at, tensor in enumerate(tensors):
        if at not in pieces:
            least = load.index(min(load))
            load[least] += tensor.nbytes
            pieces[at] = [WeightPiece(at, 0, tensor.numel(), least, is_whole=True)]
    return [piece for at in range(len(tensors)) for piece in pieces[at]]


def cut_evenly(position: int, numbers: int, servers: int) -> list[WeightPiece]:
    """As many pieces as servers; each begins at the rounded part of the whole."""
    starts = [round(numbers * server / servers) for server in range(servers + 1)]
    return [
        WeightPiece(position, start, stop, server, is_whole=False)
        for server, (start, stop) in enumerate(pairwise(starts))
    ]


ALIGNED = 64


@dataclass(frozen=True)
class Run:
    """The bytes `start` to `stop` - 1, of numbers of one type."""

    start: int
    stop: int
    type: torch.dtype


class FlatLayout:
    """The offsets of the `pieces` of one server, in order.

    A piece that is a whole parameter keeps its shape; others are (numbers,).
    """

    def __init__(self, pieces: Sequence[WeightPiece], parameters: Sequence[nn.Parameter]) -> None:
        self.pieces = list(pieces)
        params = [parameters[piece.position] for piece in pieces]
        shapes = zip(pieces, params, strict=True)
        self.shapes = [
            tuple(param.shape) if piece.is_whole else (piece.numbers,) for piece, param in shapes
        ]
        self.runs: list[Run] = []
        self.starts = [0] * len(self.pieces)
        at = 0
        for kind in dict.fromkeys(param.dtype for param in params):
            start = at = -(-at // ALIGNED) * ALIGNED
            for number, (piece, param) in enumerate(zip(pieces, params, strict=True)):
                if param.dtype == kind:
                    self.starts[number] = at
                    at += piece.numbers * param.element_size()
            self.runs.append(Run(start, at, kind))
        self.types = [param.dtype for param in params]
        self.nbytes = at

    def new(self, memory: Any = None) -> Flat:
        """Memory for all pieces: zeros, or `memory` (a writable buffer of `nbytes`)."""
        if memory is None:
            raw = torch.zeros(self.nbytes, dtype=torch.uint8)
        elif self.nbytes:
            raw = torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes]
        else:
            raw = torch.empty(0, dtype=torch.uint8)
        return Flat(self, raw)


class Flat:
    """Numbers in a layout: `raw` (nbytes,) bytes, `flats` one tensor for each type, and `views`
    one for each piece, all of the same memory."""

    def __init__(self, layout: FlatLayout, raw: Tensor) -> None:
        self.layout, self.raw = layout, raw
        self.flats = [raw[run.start : run.stop].view(run.type) for run in layout.runs]
        self.views = [
            raw[start : start + piece.numbers * kind.itemsize].view(kind).view(shape)
            for start, piece, kind, shape in zip(
                layout.starts, layout.pieces, layout.types, layout.shapes, strict=True
            )
        ]

    @property
    def buffer(self) -> memoryview:
        """The bytes, in place."""
        array: Any = self.raw.numpy()
        return memoryview(array)

    def place(self, _: Message, size: int) -> memoryview:
        """The memory which receives a body: this one, or new memory if it does not fit."""
        return self.buffer[:size] if size <= self.layout.nbytes else memoryview(bytearray(size))

    def copy_(self, other: Flat) -> None:
        self.raw.copy_(other.raw)

    def scale_(self, factor: float) -> None:
        """Multiply all numbers."""
        if factor != 1:
            for flat in self.flats:
                flat.mul_(factor)

    def add_(self, other: Flat) -> None:
        """Add the numbers of another memory in the same layout."""
        for flat, more in zip(self.flats, other.flats, strict=True):
            flat.add_(more)

    def copy(self) -> Flat:
        """A copy in new memory."""
        flat = self.layout.new()
        flat.copy_(self)
        return flat

    @torch.no_grad()
    def be_memory_of(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make whole parameters views of this memory: weights are received without a copy."""
        for piece, view in zip(self.layout.pieces, self.views, strict=True):
            param = parameters[piece.position]
            if piece.is_whole and param.device == view.device and param.is_contiguous():
                view.copy_(param)
                param.data = view

    @torch.no_grad()
    def read_from(self, whole: Sequence[Tensor | None]) -> list[int]:
        """Copy the pieces out of whole tensors, by position; zeros for `None`.

        Returns the positions of the `None`.
        """
        missing = []
        for piece, view in zip(self.layout.pieces, self.views, strict=True):
            tensor = whole[piece.position]
            if tensor is None:
                view.zero_()
                missing.append(piece.position)
            elif tensor.data_ptr() != view.data_ptr():  # else it is this memory
                view.copy_(cut(tensor, piece).view(view.shape))
        return missing

    @torch.no_grad()
    def write_to(self, whole: Sequence[Tensor]) -> None:
        """Copy the pieces into whole tensors, by their positions."""
        for piece, view in zip(self.layout.pieces, self.views, strict=True):
            target = cut(whole[piece.position], piece)
            if target.data_ptr() != view.data_ptr():  # else it is this memory
                target.copy_(view.view(target.shape))


def cut(tensor: Tensor, piece: WeightPiece) -> Tensor:
    """The numbers of a piece: a view of a contiguous tensor."""
    return tensor if piece.is_whole else tensor.reshape(-1)[piece.start : piece.stop]
