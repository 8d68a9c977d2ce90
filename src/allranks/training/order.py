"""The order of the data: a pure function of (seed, epoch) that no rank has to communicate.

Step `s` of an epoch uses samples `order[s·B : (s+1)·B]`, cut into shards by `shards.even_sizes`.
Every engine reads its samples through here, so they are the same whatever trains and wherever.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray


class Order:
    """The batches of a data set of `samples` samples, in the order of each epoch.

    `last_batch` is `keep` (the rest of an epoch is a smaller batch) or `drop`.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, last_batch: str) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        full, rest = divmod(samples, batch_size)
        self.steps_per_epoch = full + (rest > 0 and last_batch == "keep")
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The samples of step `step` of `epoch`: (batch,) indices into the data set."""
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(self.samples)
        return self._order[step * self.batch_size : (step + 1) * self.batch_size]


def random_key(*parts: int) -> int:
    """A seed of 63 bits from whole numbers, the same on every machine: one stream per key."""
    digest = hashlib.blake2b(_packing(len(parts))(*parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@cache
def _packing(numbers: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{numbers}q").pack
