"""The placement of a rank's variables, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from allranks.job.place import BUFFER, OPTIMIZER, PARAMETER, Placed
from allranks.tensorflow.build import names_of, unique_names
from allranks.tensorflow.trainer import Trainer


def rows_of(trainer: Trainer) -> Iterator[Placed]:
    """Every variable of this process, once for each of its copies."""
    trained = {id(v) for v in trainer.built.model.trainable_variables}
    for name, variable in names_of(trainer.built.model).items():
        is_trained = id(variable) in trained
        kind = PARAMETER if is_trained else BUFFER
        yield from _copies(trainer, kind, name, variable, with_gradient=is_trained)
    for name, variable in unique_names(trainer.built.optimizer.variables).items():
        yield from _copies(trainer, OPTIMIZER, name, variable, with_gradient=False)


def _copies(
    trainer: Trainer, kind: str, name: str, variable: Any, *, with_gradient: bool
) -> Iterator[Placed]:
    copies = trainer.strategy.distribution.experimental_local_results(variable.value)
    dtype = tf.as_dtype(variable.dtype)
    for replica, copy in enumerate(copies):
        for part in parts_of(copy):  # several where it is cut over servers
            shape = tuple(int(n) for n in part.shape)
            size = math.prod(shape) * int(dtype.size)
            gradient = size if with_gradient else 0
            device = short_name(part.device)
            yield Placed(kind, name, device, dtype.name, shape, size, gradient, 0, replica)


def parts_of(value: Any) -> list[Any]:
    """The variables of TensorFlow that one is made of: several where it is cut over servers."""
    parts = getattr(value, "variables", None)
    return list(parts) if isinstance(parts, (list, tuple)) else [value]


def short_name(device: str) -> str:
    """`/job:ps/replica:0/task:1/device:CPU:0` -> `server 1 cpu:0`; of this process, `cpu:0`."""
    where = device.split("task:")[-1].split("/")[0] if "/job:ps/" in device else ""
    short = (device or "/device:CPU:0").split("device:")[-1].lower()
    return f"server {where} {short}" if where else short
