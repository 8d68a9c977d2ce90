"""The trace of a process that trains with TensorFlow: see `training.record.trace`.

Each replica of a process has rows of its own, with the copy of the weights on its device, so that
replicas that drift apart are seen in one process too. A Keras variable that is trained is a weight,
another one a buffer; the states of random streams are neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from allranks.tensorflow.build import Array, copies_of, names_of
from allranks.tensorflow.data.batches import Batch
from allranks.tensorflow.step.inputs import MAGNITUDE
from allranks.tensorflow.strategies.parameter_server import pieces_of
from allranks.tensorflow.trainer import Trainer
from allranks.training.record import trace


class Trace(trace.Trace[Array]):
    """Writes the trace of the replicas of one process. It is the probe of the graphs of its steps.

    `steps` is how many the job is to make: as asked, or as many as the space for tensors allows.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        super().__init__(folder, trainer.strategy.own, trainer.job)
        model = trainer.built.model
        trained = {id(variable) for variable in model.trainable_variables}
        self._variables = {
            f"{'weight' if id(variable) in trained else 'buffer'}/{name}": variable
            for name, variable in names_of(model).items()
        }
        names = {id(variable): name for name, variable in names_of(model).items()}
        # of a variable that is cut over servers each part has a gradient of its own
        self._of_gradient = [
            names[id(variable)]
            for variable in model.trainable_variables
            for _ in pieces_of(variable.value)
        ]
        kinds = 1 if trainer.task.clip_norm is None else 2
        state = self._state(1)[0]
        trained_bytes = sum(a.nbytes for name, a in state.items() if name.startswith("weight/"))
        every = sum(array.nbytes for array in state.values())
        self.steps = trace.traced_steps(trainer.job, kinds * trained_bytes + every)

    def inside(self, replica: int, found: dict[str, Any]) -> None:
        """Within a step: the gradients of one replica, and how large its losses are."""
        self.magnitude = (self.magnitude or 0.0) + float(found[MAGNITUDE])
        parts: dict[str, list[Array]] = {}
        for key, value in found.items():
            stage, _, number = key.partition("/")
            if number:
                name = f"{stage}/{self._of_gradient[int(number)]}"
                parts.setdefault(name, []).append(np.asarray(value))
        for name, arrays in parts.items():
            self.keep(replica, name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def ids(self, batch: Batch) -> list[list[int]]:
        """The samples of each replica; those of a `tf.data.Dataset` have no number."""
        counts = [sum(p.samples for micro in own for p in micro) for own in batch.cut.pieces]
        return [part.tolist() for part in np.split(batch.ids, np.cumsum(counts)[:-1])]

    def whole(self, gradients: list[dict[str, Array]]) -> list[dict[str, Array]]:
        """Gradients and variables of each replica."""
        states = self._state(len(gradients))
        return [{**own, **state} for own, state in zip(gradients, states, strict=True)]

    def _state(self, copies: int) -> list[dict[str, Array]]:
        held = {name: copies_of(v, copies) for name, v in self._variables.items()}
        return [{name: arrays[n] for name, arrays in held.items()} for n in range(copies)]

    @staticmethod
    def digest(tensor: Array) -> str:
        """The start of a SHA-256 of its bytes."""
        return hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()[:16]

    @staticmethod
    def store(tensors: Mapping[str, Array], path: Path) -> None:
        """Write tensors, those of 16 bits in 32."""
        save_file({name: _storable(array) for name, array in tensors.items()}, path)

    def take_over(self, path: Path) -> None:
        """Set every variable, on all devices."""
        arrays = load_file(path)
        for name, variable in self._variables.items():
            found = arrays.get(name)  # what the other run does not have is what `check` will say
            if found is not None and tuple(variable.shape) == found.shape:
                variable.assign(found)


def _storable(array: Array) -> Array:
    short = array.dtype.itemsize == 2 and array.dtype.kind not in "iu"  # float16 and bfloat16
    return np.ascontiguousarray(array.astype(np.float32) if short else array)
