"""What goes into the graph of a step, and the sums that come out of it, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from allranks.strategies.shards import Micro

SUM = tf.distribute.ReduceOp.SUM
HEAD = 5
LOSS, WEIGHT, SAMPLES, STOP, SAVE = range(HEAD)
FINE = HEAD + 1  # in the row for the host


@dataclass(frozen=True)
class Cut:
    """How a global batch is cut, as far as this process sees it.

    `pieces` are those of shards, for each local replica and each of its micro-batches; `spare` says
    that some replica, here or elsewhere, has no sample of this batch.
    """

    pieces: tuple[tuple[Micro, ...], ...]
    spare: bool = False


@dataclass(frozen=True)
class StepInputs:
    """What the host says to a step: numbers that change from step to step without a new graph.

    `key` belongs to (seed, step); `limit` is the longest gradient that is not a spike; `poison` is
    1, or NaN where a fault is made on purpose.
    """

    key: int
    nominal: float
    rate: float
    stop: bool = False
    save: bool = False
    scale: float = 1.0
    limit: float = math.inf
    poison: float = 1.0

    def numbers(self) -> list[float]:
        return [
            *(self.nominal, self.rate, self.stop, self.save, self.scale, self.limit),
            self.poison,
        ]


def pack(says: list[StepInputs]) -> Any:
    """One tensor of what is said to each step, (steps, 8): the key, and the bits of the numbers."""
    numbers = np.array([said.numbers() for said in says], np.float64).view(np.int64)
    return tf.constant(np.column_stack([[said.key for said in says], numbers]), tf.int64)


NOMINAL, RATE, ASKED_STOP, ASKED_SAVE, SCALE, LIMIT, POISON = range(7)


@dataclass(frozen=True)
class StepSums:
    """What a step says to the host. `bad` are the replicas whose own part is not finite."""

    loss: float
    weight: float
    samples: int
    stop: bool
    save: bool
    norm: float
    fine: bool
    rate: float
    bad: tuple[int, ...]
