"""Which server has which numbers, and how they lie in its memory.

A tensor of `bound` numbers or more is cut into as many pieces as there are servers, of equal size
but for rounding (MXNet's kvstore cuts so, from 10^6 numbers on). Of the others each goes, in the
order of the model, to the server that has the fewest bytes so far, the first of those (TensorFlow's
greedy load balancing). A tensor that its optimizer must see whole is not cut.

The pieces of one server lie in one piece of memory, which is sent, summed and updated as a whole:

    | numbers of the first type, piece by piece | pad to 64 bytes | numbers of the second type | …

All processes come to the same layout, so a message is the bytes as they lie, and needs no names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn

from allranks.torch.shared_memory.library import library

MOST_NUMBERS = 1_000_000


@dataclass(frozen=True)
class Sized:
    """A tensor that is to be placed: how many numbers it has, of how many bytes each."""

    numbers: int
    itemsize: int


@dataclass(frozen=True)
class WeightPiece:
    """The numbers `start` to `stop` - 1 of the tensor at `position`, and the server that has them.

    `is_whole`: they are all of it.
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
    tensors: Sequence[Sized],
    servers: int,
    bound: int = MOST_NUMBERS,
    whole: Collection[int] = (),
) -> list[WeightPiece]:
    """The pieces of all tensors, in their order; the tensors at the positions `whole` are not cut.

    A tensor is not cut either where it has fewer numbers than there are servers.
    """
    load, found = [0] * servers, dict[int, list[WeightPiece]]()
    cut = [
        at
        for at, one in enumerate(tensors)
        if servers > 1 and at not in whole and one.numbers >= max(bound, servers)
    ]
    for at in cut:
        found[at] = cut_evenly(at, tensors[at].numbers, servers)
        for piece in found[at]:
            load[piece.server] += piece.numbers * tensors[at].itemsize
    for at, one in enumerate(tensors):
        if at not in found:
            least = load.index(min(load))
            load[least] += one.numbers * one.itemsize
            found[at] = [WeightPiece(at, 0, one.numbers, least, is_whole=True)]
    return [piece for at in range(len(tensors)) for piece in found[at]]


def cut_evenly(position: int, numbers: int, servers: int) -> list[WeightPiece]:
    """As many pieces as servers; each begins at the rounded part of the whole."""
    starts = [round(numbers * server / servers) for server in range(servers + 1)]
    return [
        WeightPiece(position, starts[server], starts[server + 1], server, is_whole=False)
        for server in range(servers)
    ]


ALIGNED = 64
MANY = 2**17
"""So many numbers are squared in their own type by short rows, and fewer in doubles."""
SQUARED = {torch.float32, torch.float64}
LEAST_SQUARE = 1e-30  # of a number, on the average: what is less may be 0 in 32 bits
LIBRARY = library()


@dataclass(frozen=True)
class Run:
    """The bytes `start` to `stop` - 1, of numbers of one type."""

    start: int
    stop: int
    type: torch.dtype


class FlatLayout:
    """Where each of the `pieces` of some parameters lies: those of one server, in order.

    A piece that is a whole parameter keeps its shape; others are (numbers,).
    """

    def __init__(self, pieces: Sequence[WeightPiece], parameters: Sequence[nn.Parameter]) -> None:
        self.pieces = list(pieces)
        held = [parameters[piece.position] for piece in pieces]
        shapes = zip(pieces, held, strict=True)
        self.shapes = [
            tuple(own.shape) if piece.is_whole else (piece.numbers,) for piece, own in shapes
        ]
        self.runs: list[Run] = []
        self.starts = [0] * len(self.pieces)
        at = 0
        for kind in dict.fromkeys(own.dtype for own in held):
            start = at = -(-at // ALIGNED) * ALIGNED
            for number, (piece, own) in enumerate(zip(pieces, held, strict=True)):
                if own.dtype == kind:
                    self.starts[number] = at
                    at += piece.numbers * own.element_size()
            self.runs.append(Run(start, at, kind))
        self.types = [own.dtype for own in held]
        self.nbytes = at

    def new(self, memory: Any = None) -> Flat:
        """Memory for all pieces, of zeros unless it is given (a writable buffer of `nbytes`)."""
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
        """The bytes where they lie."""
        array: Any = self.raw.numpy()
        return memoryview(array)

    def place(self, size: int) -> memoryview:
        """Where so many bytes that come go."""
        return self.buffer[:size]

    def copy_(self, other: Flat) -> None:
        self.raw.copy_(other.raw)

    def scale_(self, factor: float) -> None:
        """Multiply all numbers."""
        if factor != 1:
            for flat in self.flats:
                flat.mul_(factor)

    def add_(self, other: Flat) -> None:
        """Add the numbers of another memory in the same layout."""
        for own, more in zip(self.flats, other.flats, strict=True):
            own.add_(more)

    def add_and_square_(self, other: Flat) -> float | None:
        """Add the numbers of another memory; returns the squares of the sums, in the same pass.

        Where nothing is compiled for that, numbers are few, or squares are out of the range of 32
        bits, it returns `None`, and adds.
        """
        pairs = list(zip(self.flats, other.flats, strict=True))
        numbers = sum(own.numel() for own, _ in pairs)
        kinds = {own.dtype for own, _ in pairs}
        if LIBRARY is None or numbers < MANY or not kinds <= SQUARED:
            self.add_(other)
            return None
        found = 0.0
        for own, more in pairs:
            is_double = own.dtype == torch.float64
            found += LIBRARY.add_and_square(own.data_ptr(), more.data_ptr(), own.numel(), is_double)
        return found if are_squares(found, numbers) else None

    def copy(self) -> Flat:
        """The same numbers in memory of their own."""
        found = self.layout.new()
        found.copy_(self)
        return found

    def homes_of(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, tuple[nn.Parameter, Tensor]]:
        """Where gradients are to lie, by their positions: of parameters that are whole here.

        Those of a device lie there, and are copied.
        """
        pairs = zip(self.layout.pieces, self.views, strict=True)
        found = {p.position: (parameters[p.position], view) for p, view in pairs if p.is_whole}
        return {at: home for at, home in found.items() if home[0].device == home[1].device}

    @torch.no_grad()
    def be_memory_of(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let parameters that are whole here lie here: what comes is theirs without a copy."""
        for piece, view in zip(self.layout.pieces, self.views, strict=True):
            own = parameters[piece.position]
            if piece.is_whole and own.device == view.device and own.is_contiguous():
                view.copy_(own)
                own.data = view

    @torch.no_grad()
    def read_from(self, whole: Sequence[Tensor | None]) -> list[int]:
        """Copy the pieces of whole tensors, by their positions; zeros for one that is `None`.

        Returns the positions of those that are zeros.
        """
        missing = []
        for piece, view in zip(self.layout.pieces, self.views, strict=True):
            tensor = whole[piece.position]
            if tensor is None:
                view.zero_()
                missing.append(piece.position)
            elif tensor.data_ptr() != view.data_ptr():  # else it lies here already
                view.copy_(cut(tensor, piece).view(view.shape))
        return missing

    @torch.no_grad()
    def write_to(self, whole: Sequence[Tensor]) -> None:
        """Copy the pieces into whole tensors, by their positions."""
        for piece, view in zip(self.layout.pieces, self.views, strict=True):
            target = cut(whole[piece.position], piece)
            if target.data_ptr() != view.data_ptr():  # else it lies here already
                target.copy_(view.view(target.shape))


def cut(tensor: Tensor, piece: WeightPiece) -> Tensor:
    """The numbers of a piece: of a contiguous tensor a view."""
    return tensor if piece.is_whole else tensor.reshape(-1)[piece.start : piece.stop]


def are_squares(found: float, numbers: int) -> bool:
    """Whether a sum of squares is right, though each was computed in the type of its number."""
    return isnan(found) or LEAST_SQUARE * numbers < found < inf
