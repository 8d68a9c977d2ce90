"""What goes into the graph of a step, and the sums that come out of it, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from allranks.strategies.shards import Micro

SUM = tf.distribute.ReduceOp.SUM
HEAD = 5
LOSS, WEIGHT, SAMPLES, STOP, SAVE = range(HEAD)
FINE = HEAD + 1  # in the row for the host


@dataclass(frozen=True)
class InputSplit:
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


# --- insides -------------------------------------------------------------------------------------
# What is within a step, beside its result: the gradients on their way, for who traces a training.
#
# They leave the graph only where somebody looks.


MAGNITUDE = "magnitude"
Insides = list[dict[str, Any]]
"""For each local replica: `stage/number` -> the gradient of that variable; `MAGNITUDE` -> the size
of the losses."""


class GraphProbe(Protocol):
    """Looks into steps. `replica` counts those of this process."""

    def begin(self, batch: Any) -> None:
        """A step begins."""

    def inside(self, replica: int, found: dict[str, Any]) -> None:
        """What was within it, on one of the local replicas."""


def by_replica(local: Any, inside: dict[str, Any]) -> Insides:
    """Of what replicas have returned, for each of them by itself; `local` lists their values."""
    values = {name: local(value) for name, value in inside.items()}
    count = min(map(len, values.values()), default=0)
    return [{name: found[n] for name, found in values.items()} for n in range(count)]


def named(stage: str, gradients: list[Any]) -> dict[str, Any]:
    """The gradients that there are, by stage and the place of their variable."""
    return {f"{stage}/{n}": g for n, g in enumerate(gradients) if g is not None}
