"""A rank of an MPI in `collectives.py`: started by that MPI's own launcher, without torch.

    LAUNCHER -n RANKS python collectives_mpi.py ADDRESS

mpi4py takes the library that `MPI4PY_LIBMPI` names. `whole` calls it once for all bytes, "in
pieces" once for each piece of an array: the best that each MPI can do.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
from collectives_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    ITEM,
    REDUCE_SCATTER,
    Call,
    Library,
    Timing,
    Values,
)
from mpi4py import MPI
from turns import answer_asked

WHOLE = "whole"
PIECES = {"in 1 MB pieces": 2**20, "in 256 KB pieces": 2**18}  # bytes


class MPILibrary(Library):
    """Calls of mpi4py with buffers that it need not look at again; `piece` in bytes, 0: whole."""

    def __init__(self, piece: int = 0) -> None:
        self.world = MPI.COMM_WORLD
        self.rank, self.ranks, self.piece = self.world.rank, self.world.size, piece

    def barrier(self) -> None:
        self.world.Barrier()

    def call_of(self, kind: str, given: Values, taken: Values) -> Call:
        source, target = _buffer(given), _buffer(taken)
        if kind == ALL_REDUCE and self.piece:
            return self._in_pieces(given, taken)
        if kind == BROADCAST:
            broadcast, roots = self.world.Bcast, itertools.cycle(range(self.ranks))
            return lambda: broadcast(target, next(roots))
        collective = {
            ALL_REDUCE: self.world.Allreduce,
            REDUCE_SCATTER: self.world.Reduce_scatter_block,
            ALL_GATHER: self.world.Allgather,
        }.get(kind)
        if collective is not None:
            return lambda: collective(source, target)
        return self._there_and_back(source, target)

    def _in_pieces(self, given: Values, taken: Values) -> Call:
        step, reduce = self.piece // ITEM, self.world.Allreduce
        cuts = [slice(start, start + step) for start in range(0, len(given), step)]
        pieces = [(_buffer(given[cut]), _buffer(taken[cut])) for cut in cuts]

        def call() -> None:
            for source, target in pieces:
                reduce(source, target)

        return call

    def _there_and_back(self, source: Any, target: Any) -> Call:
        """Between neighbours: the even rank sends first, and every second call."""
        send, receive, other = self.world.Send, self.world.Recv, self.rank ^ 1
        if self.rank < other:

            def call() -> None:
                send(source, other)
                receive(target, other)
        else:

            def call() -> None:
                receive(target, other)
                send(source, other)

        return call


def _buffer(values: Values) -> list[Any]:
    assert values.dtype == np.float32
    return [values, MPI.FLOAT]


def main() -> None:
    """Answer until there are no more questions."""
    libraries: dict[str, Library] = {WHOLE: MPILibrary()}
    libraries |= {name: MPILibrary(piece) for name, piece in PIECES.items()}
    answer_asked(sys.argv[1], MPI.COMM_WORLD.rank, Timing(libraries).answer)


if __name__ == "__main__":
    main()
