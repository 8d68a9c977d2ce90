"""The order of the data, and the epoch that it is read in.

The order is a pure function of (seed, epoch) that no rank has to communicate. Step `s` of an epoch
uses samples `order[s·B : (s+1)·B]`, cut into shards by `shards.even_sizes`. Every engine reads its
samples through here, so they are the same whatever trains and wherever.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, ValuesView
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from allranks.training.progress import Progress

DEEPEST = 16  # data sets within each other: an object that has any attribute would have no end


class Order:
    """The batches of a data set of `samples` samples, in the order of each epoch.

    `last_batch` is `keep` (the rest of an epoch is a smaller batch) or `drop`. Each epoch is
    another permutation, or if it never `shuffles` the order of the data set.
    """

    def __init__(
        self, samples: int, batch_size: int, seed: int, last_batch: str, *, shuffles: bool = True
    ) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.shuffles = shuffles
        full, remainder = divmod(samples, batch_size)
        self.steps_per_epoch = full + (remainder > 0 and last_batch == "keep")
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def steps_in(self, epoch: int) -> int:
        """The batches of an epoch: all have as many."""
        return self.steps_per_epoch

    def batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The samples of step `step` of `epoch`: (batch,) indices into the data set."""
        if not self.shuffles:
            start = step * self.batch_size
            return np.arange(start, min(start + self.batch_size, self.samples))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(self.samples)
        return self._order[step * self.batch_size : (step + 1) * self.batch_size]


def places_after(
    done: Progress, epochs: int, steps: int | None, steps_in: Callable[[int], int]
) -> Iterator[tuple[int, int, int]]:
    """Of each batch after `done`: its index in the job, its epoch, and its step in the epoch.

    To the end of `epochs` epochs or of `steps` steps; epoch `e` has `steps_in(e)` steps.
    """
    epoch, step, index = done.epoch, done.step_in_epoch, done.batch_index
    while epoch < epochs and (steps is None or index < steps):
        if step >= steps_in(epoch):
            epoch, step = epoch + 1, 0
            continue
        yield index, epoch, step
        step, index = step + 1, index + 1


def random_key(*parts: int) -> int:
    """A seed of 63 bits from whole numbers, the same on every machine: one stream per key."""
    digest = hashlib.blake2b(_packing(len(parts))(*parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@cache
def _packing(numbers: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{numbers}q").pack


class Epochs:
    """The objects at and below `roots` that have a `set_epoch`: curricula, masks of the epoch.

    Called by what reads the data, in the process that reads, with the epoch of the samples.
    An object with one answers for what it wraps. One without is looked into, where it has a
    `dataset` or `datasets`, as torch's Subset and ConcatDataset have.
    """

    _current: ClassVar[dict[int, tuple[weakref.ref[Any], int]]] = {}
    """Of every object in this process, as two sources may share one."""

    def __init__(self, *roots: Any) -> None:
        self._parts: list[Any] = []
        for root in roots:
            self._add(root, DEEPEST)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def _add(self, part: Any, depth: int) -> None:
        if part is None or depth == 0 or any(part is known for known in self._parts):
            return
        if callable(getattr(part, "set_epoch", None)):
            self._parts.append(part)
            return
        self._add(getattr(part, "dataset", None), depth - 1)
        several = getattr(part, "datasets", ())
        several = several.values() if isinstance(several, Mapping) else several
        for inner in several if isinstance(several, (list, tuple, ValuesView)) else ():
            self._add(inner, depth - 1)

    def enter(
        self, epoch: int, key_generators: Callable[[], object], *, again: bool = False
    ) -> None:
        """Call `set_epoch(epoch)` of each object that is at another epoch, or `again` of all.

        `key_generators` is called before each, for what it draws.
        """
        for part in self._parts:
            key = id(part)
            known = self._current.get(key)
            if not again and known is not None and known[0]() is part and known[1] == epoch:
                continue
            key_generators()
            part.set_epoch(epoch)
            self._remember(part, epoch)

    def _remember(self, part: Any, epoch: int) -> None:
        key = id(part)

        def forget(_: object) -> None:
            self._current.pop(key, None)

        try:
            self._current[key] = weakref.ref(part, forget), epoch
        except TypeError:  # without weak references: it is called for every sample
            self._current.pop(key, None)
