"""Which server holds which numbers: large tensors are cut over all, small ones are balanced.

A tensor of `bound` numbers or more is cut into as many pieces as there are servers, of equal size
but for rounding (MXNet's kvstore cuts so, from 10^6 numbers on). Of the others each goes, in the
order of the model, to the server that has the fewest bytes so far, the first of those (TensorFlow's
greedy load balancing). A tensor that its optimizer must see whole is not cut. Pure arithmetic: all
processes of a job come to the same pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_NUMBERS = 1_000_000


@dataclass(frozen=True)
class Sized:
    """A tensor that is to be placed: how many numbers it has, of how many bytes each."""

    numbers: int
    itemsize: int


@dataclass(frozen=True)
class Piece:
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
) -> list[Piece]:
    """The pieces of all tensors, in their order; the tensors at the positions `whole` are not cut.

    A tensor is not cut either where it has fewer numbers than there are servers.
    """
    load, found = [0] * servers, dict[int, list[Piece]]()
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
            found[at] = [Piece(at, 0, one.numbers, least, is_whole=True)]
    return [piece for at in range(len(tensors)) for piece in found[at]]


def cut_evenly(position: int, numbers: int, servers: int) -> list[Piece]:
    """As many pieces as servers; each begins at the rounded part of the whole."""
    starts = [round(numbers * server / servers) for server in range(servers + 1)]
    return [
        Piece(position, starts[server], starts[server + 1], server, is_whole=False)
        for server in range(servers)
    ]
