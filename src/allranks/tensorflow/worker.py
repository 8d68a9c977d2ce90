"""One rank of a TensorFlow job; the launcher starts it by name (see `rank_program`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
from numpy.typing import NDArray

from allranks.checkpoint.array_snapshot import Snapshot
from allranks.checkpoint.tensor_file import digest_of_weights
from allranks.job.job import Job
from allranks.job.place import Placed, write_placement
from allranks.job.run_folder import JsonLines
from allranks.launcher.world import World
from allranks.strategies.roles import EVALUATOR, WORKER
from allranks.tensorflow.comm import meant_by
from allranks.tensorflow.machine import check_task_limits, set_threads
from allranks.tensorflow.parameter_server.server import CHIEF, SERVER, evaluate_checkpoints, serve
from allranks.tensorflow.parameter_server.trainer import ServedTrainer
from allranks.tensorflow.placement import rows_of
from allranks.tensorflow.saving import facts
from allranks.tensorflow.trace import Trace
from allranks.tensorflow.trainer import Trainer
from allranks.training.callback import Callback
from allranks.training.keras_task import Task
from allranks.training.rank_program import RankProgram, Role
from allranks.training.record.keeping import Keeping, write_where_room_is
from allranks.training.task_fields import task_of


def load_task(job: Job) -> Task:
    """The task of a job with its fields set; raises `RequestError`."""
    keras.utils.set_random_seed(job.seed % 2**32)
    task = task_of(job, Task)
    check_task_limits(task)
    return task


def evaluate(job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` while others train."""
    evaluate_checkpoints(load_task(job), job, world, events)


class RecordPlacement(Callback):
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
        kind = ServedTrainer if self.world.role == CHIEF else Trainer
        trainer = kind(task, self.job, world=self.world, **more)
        if self.job.trace:
            trace = Trace(self.record.run_dir / "trace", trainer)
            trainer.graphs.probe = trace
            trainer.callbacks.insert(0, trace)
            trainer.job = dataclasses.replace(trainer.job, steps=trace.steps)
        return trainer

    def callbacks(self) -> list[Callback]:
        """Who hears of the steps: the placement, which needs no update, and the record."""
        return [RecordPlacement(), self.record]

    def placement(self, trainer: Trainer) -> Iterable[Placed]:
        """What this process holds; the optimizer has all its variables."""
        return rows_of(trainer)

    def save_weights(self, trainer: Trainer, keeping: Keeping) -> None:
        """`weights.safetensors`, of a copy of all weights."""
        if not self.world.is_leader:
            return
        taken = Snapshot()
        taken.take(dict(trainer.weights()))
        parts = taken.layout.header, taken.data
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
