"""One rank of a TensorFlow job; the launcher starts it by name (see `rank_program`)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from allranks.checkpoint.array_snapshot import ArraySnapshot
from allranks.checkpoint.export import digest_of_weights
from allranks.job.job import Job
from allranks.job.place import BUFFER, OPTIMIZER, PARAMETER, Placed, write_placement
from allranks.job.run_folder import JsonLines
from allranks.launcher.world import World
from allranks.strategies.roles import EVALUATOR, WORKER
from allranks.tensorflow.build import Array, copies_of, names_of, unique_names
from allranks.tensorflow.comm import meant_by
from allranks.tensorflow.data.batches import ReplicaBatch
from allranks.tensorflow.machine import check_task_limits, set_threads
from allranks.tensorflow.parameter_server.server import CHIEF, SERVER, evaluate_checkpoints, serve
from allranks.tensorflow.parameter_server.trainer import ChiefTrainer
from allranks.tensorflow.saving import facts
from allranks.tensorflow.step.inputs import MAGNITUDE
from allranks.tensorflow.strategies.parameter_server import pieces_of
from allranks.tensorflow.trainer import Trainer
from allranks.training.callback import Callback
from allranks.training.keras_task import Task
from allranks.training.rank_program import RankProgram, Role
from allranks.training.record import trace
from allranks.training.record.logs import Keeping, write_where_room_is
from allranks.training.task_fields import task_of

# --- placement -----------------------------------------------------------------------------------
# The placement of a rank's variables, gradients and optimizer state.


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
        for part in pieces_of(copy):  # several where it is cut over servers
            shape = tuple(int(n) for n in part.shape)
            size = math.prod(shape) * int(dtype.size)
            gradient = size if with_gradient else 0
            device = short_name(part.device)
            yield Placed(kind, name, device, dtype.name, shape, size, gradient, 0, replica)


def short_name(device: str) -> str:
    """`/job:ps/replica:0/task:1/device:CPU:0` -> `server 1 cpu:0`; of this process, `cpu:0`."""
    where = device.split("task:")[-1].split("/")[0] if "/job:ps/" in device else ""
    short = (device or "/device:CPU:0").split("device:")[-1].lower()
    return f"server {where} {short}" if where else short


# --- trace ---------------------------------------------------------------------------------------
# The trace of a process that trains with TensorFlow: see `training.record.trace`.
#
# Each replica of a process has rows of its own, with the copy of the weights on its device, so that
# replicas that drift apart are seen in one process too. A Keras variable that is trained is a
# weight, another one a buffer; the states of random streams are neither.


class ReplicaTrace(trace.TraceWriter[Array]):
    """Writes the trace of the replicas of one process. It is the probe of the graphs of its steps.

    `steps` is how many the job is to make: as asked, or as many as the space for tensors allows.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        super().__init__(folder, trainer.strategy.local_replicas, trainer.job)
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

    def inside(self, replica: int, values: dict[str, Any]) -> None:
        """Within a step: the gradients of one replica, and how large its losses are."""
        self.magnitude = (self.magnitude or 0.0) + float(values[MAGNITUDE])
        parts: dict[str, list[Array]] = {}
        for key, value in values.items():
            stage, _, number = key.partition("/")
            if number:
                name = f"{stage}/{self._of_gradient[int(number)]}"
                parts.setdefault(name, []).append(np.asarray(value))
        for name, arrays in parts.items():
            self.keep(replica, name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def ids(self, batch: ReplicaBatch) -> list[list[int]]:
        """The samples of each replica; those of a `tf.data.Dataset` have no number."""
        counts = [sum(p.samples for micro in pieces for p in micro) for pieces in batch.cut.pieces]
        return [part.tolist() for part in np.split(batch.ids, np.cumsum(counts)[:-1])]

    def whole(self, gradients: list[dict[str, Array]]) -> list[dict[str, Array]]:
        """Gradients and variables of each replica."""
        states = self._state(len(gradients))
        return [{**part, **state} for part, state in zip(gradients, states, strict=True)]

    def _state(self, copies: int) -> list[dict[str, Array]]:
        copies_by_name = {name: copies_of(v, copies) for name, v in self._variables.items()}
        return [{name: arrays[n] for name, arrays in copies_by_name.items()} for n in range(copies)]

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
            array = arrays.get(name)  # what the other run does not have is what `check` will say
            if array is not None and tuple(variable.shape) == array.shape:
                variable.assign(array)


def _storable(array: Array) -> Array:
    short = array.dtype.itemsize == 2 and array.dtype.kind not in "iu"  # float16 and bfloat16
    return np.ascontiguousarray(array.astype(np.float32) if short else array)


def load_task(job: Job) -> Task:
    """The task of a job with its fields set; raises `RequestError`."""
    keras.utils.set_random_seed(job.seed % 2**32)
    task = task_of(job, Task)
    check_task_limits(task)
    return task


def evaluate(job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` while others train."""
    evaluate_checkpoints(load_task(job), job, world, events)


class RecordReplicaPlacement(Callback):
    """Before the first step: what this process holds, into the run folder."""

    def on_start(self, trainer: Trainer) -> None:
        write_placement(Path(trainer.job.run_dir), trainer.world.rank, rows_of(trainer))


class TensorFlowRank(RankProgram[Trainer]):
    """A process of a job that TensorFlow trains: a rank, or one that has another role."""

    roles: ClassVar[Mapping[str, Role]] = {WORKER: serve, SERVER: serve, EVALUATOR: evaluate}
    load_task = staticmethod(load_task)
    set_threads = staticmethod(set_threads)
    facts = staticmethod(facts)
    root_cause = staticmethod(meant_by)

    def make_trainer(self, task: Task, **more: Any) -> Trainer:
        """The trainer, with what traces it; of a chief the one that hands its steps out."""
        kind = ChiefTrainer if self.world.role == CHIEF else Trainer
        trainer = kind(task, self.job, world=self.world, **more)
        if self.job.trace:
            trace = ReplicaTrace(self.record.run_dir / "trace", trainer)
            trainer.graphs.probe = trace
            trainer.callbacks.insert(0, trace)
            trainer.job = dataclasses.replace(trainer.job, steps=trace.steps)
        return trainer

    def callbacks(self) -> list[Callback]:
        """The callbacks of every job: its placement, and its record."""
        return [RecordReplicaPlacement(), self.record]

    def placement(self, trainer: Trainer) -> Iterable[Placed]:
        """What this process holds; the optimizer has all its variables."""
        return rows_of(trainer)

    def save_weights(self, trainer: Trainer, keeping: Keeping) -> None:
        """`weights.safetensors`, of a copy of all weights."""
        if not self.world.is_leader:
            return
        snapshot = ArraySnapshot()
        snapshot.take(dict(trainer.weights()))
        parts = snapshot.layout.header, snapshot.data
        keeping.whole(
            "weights.safetensors",
            lambda paths: write_where_room_is(
                paths, sum(map(len, parts)), lambda file: file.writelines(parts)
            ),
        )

    @staticmethod
    def sha256(weights: Iterator[tuple[str, NDArray[Any]]]) -> str:
        """The digest of all weights, held one at a time."""
        return digest_of_weights((name, array.dtype.name, _bytes(array)) for name, array in weights)

    def figures(self, trainer: Trainer, samples_per_s: float | None) -> dict[str, Any]:
        """The engine, and what the card promises; TensorFlow itself sends, and counts nothing."""
        message = trainer.graphs.message_bytes
        return {
            "engine": self.job.engine,
            "card_bytes_per_step": trainer.strategy.promised_bytes(message),
        }


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


describe, main, place = TensorFlowRank.describe, TensorFlowRank.main, TensorFlowRank.place
weigh = TensorFlowRank.weigh
