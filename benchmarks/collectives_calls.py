"""What `collectives.py` asks of every library, and how its ranks time a call. NumPy only.

A library is a class with `barrier`, and `call_of`, which prepares a call: its memory is there, and
has been touched. `nbytes` is what a rank has of the whole: what it gives to an all-reduce or a
reduce-scatter, what it has after an all-gather or a broadcast, what goes there and back between two
neighbours.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
BROADCAST, THERE_AND_BACK = "broadcast", "there and back"
ITEM = 4  # bytes of a float32
Values = NDArray[np.float32]
Call = Callable[[], Any]


class Library(ABC):
    """One way to communicate between `ranks`, seen from `rank`."""

    rank: int
    ranks: int

    @abstractmethod
    def barrier(self) -> None:
        """Until all ranks are here."""

    @abstractmethod
    def call_of(self, kind: str, given: Values, taken: Values) -> Call:
        """The collective `kind` that reads `given` and leaves what it gives in `taken`."""

    def memory_of(self, kind: str, nbytes: int) -> tuple[Values, Values]:
        """What a call reads and where it writes, each as long as `kind` has it."""
        count, share = nbytes // ITEM, nbytes // ITEM // self.ranks
        given = share if kind == ALL_GATHER else count
        taken = share if kind == REDUCE_SCATTER else count
        return np.zeros(given, np.float32), np.zeros(taken, np.float32)


class Timing:
    """Answers the two questions of `collectives.py`: is a call right, and how long does it take?"""

    def __init__(self, libraries: dict[str, Library]) -> None:
        self._libraries = libraries
        self._prepared: dict[tuple[str, str, int], tuple[Call, Values, Values]] = {}

    def answer(self, what: str, name: str, kind: str, nbytes: int, *counts: int) -> list[float]:
        """`check` answers with nothing, `time` with microseconds per call, one for each burst."""
        library = self._libraries[name]
        if what == "check":
            self._prepared[name, kind, nbytes] = _checked(library, kind, nbytes)
            return []
        call, *_ = self._prepared[name, kind, nbytes]
        return _timed(library, call, *counts)


def _timed(library: Library, call: Call, calls: int, bursts: int) -> list[float]:
    """Microseconds per call of `bursts` times `calls` in a row; a burst begins at a barrier."""
    times = []
    for _ in range(bursts):
        library.barrier()
        start = time.perf_counter_ns()
        for _ in itertools.repeat(None, calls):
            call()
        times.append((time.perf_counter_ns() - start) / calls / 1e3)
    return times


def _checked(library: Library, kind: str, nbytes: int) -> tuple[Call, Values, Values]:
    """The call and its memory, after one with numbers that tell whether it is right;
    later ones get zeros."""
    given, taken = library.memory_of(kind, nbytes)
    call = library.call_of(kind, given, taken)
    given[:] = _numbers(len(given), library.rank)
    if kind == BROADCAST:
        taken[:] = given
    library.barrier()
    call()
    expected = _expected(library, kind, len(given), len(taken))
    if not np.array_equal(taken, expected):
        raise SystemExit(f"{kind}, {nbytes} bytes: rank {library.rank} has other numbers")
    library.barrier()
    given[:] = 0
    taken[:] = 0
    return call, given, taken


def _numbers(count: int, rank: int) -> Values:
    """Small whole numbers, so that sums are exact in any order."""
    return (np.arange(count) % 61 + rank).astype(np.float32)


def _expected(library: Library, kind: str, given: int, taken: int) -> Values:
    of_all = [_numbers(given, rank) for rank in range(library.ranks)]
    if kind == ALL_GATHER:
        return np.concatenate(of_all)
    if kind == BROADCAST:
        return of_all[0]
    if kind == THERE_AND_BACK:
        return of_all[library.rank ^ 1]
    total = np.sum(of_all, axis=0, dtype=np.float32)
    whole: Values = total if kind == ALL_REDUCE else total[library.rank * taken :][:taken]
    return whole
