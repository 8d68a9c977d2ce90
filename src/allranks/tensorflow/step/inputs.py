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
    """How this process's part of a global batch is cut.

    `pieces` are parts of shards, for each local replica and each of its micro-batches; `spare` says
    that some replica, here or elsewhere, has no sample of this batch.
    """

    pieces: tuple[tuple[Micro, ...], ...]
    spare: bool = False


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step from the host: numbers that change from step to step without a new graph.

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
        return [self.nominal, self.rate, self.stop, self.save, self.scale, self.limit, self.poison]


def pack(says: list[StepInputs]) -> Any:
    """The inputs of several steps as one tensor, (steps, 8): the key, and the bits of numbers."""
    numbers = np.array([inputs.numbers() for inputs in says], np.float64).view(np.int64)
    return tf.constant(np.column_stack([[inputs.key for inputs in says], numbers]), tf.int64)


NOMINAL, RATE, ASKED_STOP, ASKED_SAVE, SCALE, LIMIT, POISON = range(7)


@dataclass(frozen=True)
class StepSums:
    """Results of a step for the host. `bad` are the replicas whose own part is not finite."""

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
# Intermediate values of a step, for a trace: gradients before and after clipping.
#
# They leave the graph only if a probe is set.


MAGNITUDE = "magnitude"
Insides = list[dict[str, Any]]
"""For each local replica: `stage/number` -> the gradient of that variable; `MAGNITUDE` -> the size
of the losses."""


class GraphProbe(Protocol):
    """Receives intermediate values of steps. `replica` counts those of this process."""

    def begin(self, batch: Any) -> None:
        """A step begins."""

    def inside(self, replica: int, values: dict[str, Any]) -> None:
        """The intermediate values of a step, on one of the local replicas."""


def by_replica(local: Any, inside: dict[str, Any]) -> Insides:
    """The values of replicas, as one dict for each; `local` lists the values of a name."""
    values = {name: local(value) for name, value in inside.items()}
    count = min(map(len, values.values()), default=0)
    return [{name: local_values[n] for name, local_values in values.items()} for n in range(count)]


def named(stage: str, gradients: list[Any]) -> dict[str, Any]:
    """The gradients that are not `None`, by stage and index of their variable."""
    return {f"{stage}/{n}": g for n, g in enumerate(gradients) if g is not None}
