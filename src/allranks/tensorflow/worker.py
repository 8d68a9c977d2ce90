"""One rank of a job of the TensorFlow engine: a job comes in, a record goes out.

`describe` loads the task and says what a place must know of it; `main` trains; `place` sets the
rank up as `main` does, and says what it holds. A failure is written as an event before the process
leaves, so that the supervisor can tell who was first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from allranks.checkpoint.array_snapshot import Snapshot
from allranks.checkpoint.digest import digest_of_weights
from allranks.errors import AllranksError
from allranks.job.config import threads_per_rank
from allranks.job.job import Job
from allranks.job.placement import write_placement
from allranks.job.run_folder import JsonLines, rank_events_path
from allranks.launcher.world import World
from allranks.strategies.roles import WORKER
from allranks.tensorflow.comm import meant_by
from allranks.tensorflow.data.batches import Batch
from allranks.tensorflow.fit import fit
from allranks.tensorflow.limits import check_task_limits
from allranks.tensorflow.machine import set_threads
from allranks.tensorflow.parameter_server.evaluator import EVALUATOR, evaluate_checkpoints
from allranks.tensorflow.parameter_server.server import CHIEF, SERVER, serve
from allranks.tensorflow.parameter_server.trainer import ServedTrainer
from allranks.tensorflow.placement import rows_of
from allranks.tensorflow.saving import facts
from allranks.tensorflow.trainer import Trainer
from allranks.training.callback import Callback
from allranks.training.failure import exit_code_of, failure_of
from allranks.training.keeping import Keeping, write_where_room_is
from allranks.training.keras_task import Task
from allranks.training.logs import Logs, check_logs, open_logs, open_metrics, row_of
from allranks.training.progress import StepResult
from allranks.training.task_fields import shape_of, task_of

DIGEST_LIMIT_BYTES = 16 * 2**30


def load_task(job: Job) -> Task:
    """The task of a job with its fields set; raises `RequestError`."""
    keras.utils.set_random_seed(job.seed % 2**32)
    task = task_of(job, Task)
    check_task_limits(task)
    return task


def describe(argument: dict[str, Any]) -> int:
    """Load the task and write the event `described`, or `failed`."""
    job = Job.from_data(argument)
    with JsonLines(rank_events_path(Path(job.run_dir), 0)) as events:
        try:
            task = load_task(job)
            check_logs(job)
        except AllranksError as error:
            events.event("failed", **failure_of(error, 0, None))
            return error.exit_code
        events.event("described", shape=shape_of(task))
    return 0


def main(argument: dict[str, Any]) -> int:
    """Train as one rank; returns the exit code of the process."""
    job, world = Job.from_data(argument), World.from_environment()
    set_threads(threads_per_rank(job, world.on_machine or world.local_size))
    path = rank_events_path(Path(job.run_dir), world.rank)
    with JsonLines(path, attempt=world.attempt) as events:
        run = _Run(job, world, events)
        try:
            if world.role in (WORKER, SERVER):
                serve(job, world, events)
            elif world.role == EVALUATOR:
                evaluate_checkpoints(load_task(job), job, world, events)
            else:
                run.train()
        except BaseException as error:
            cause = meant_by(error)
            step = run.trainer.progress.batch_index if run.trainer else None
            updates = run.trainer.progress.updates if run.trainer else 0
            events.event("failed", **failure_of(cause, updates, step))
            return exit_code_of(cause)
    return 0


def place(argument: dict[str, Any]) -> int:
    """Set this rank up, write what it holds, and leave."""
    job, world = Job.from_data(argument), World.from_environment()
    set_threads(threads_per_rank(job, world.on_machine or world.local_size))
    run_dir = Path(job.run_dir)
    with JsonLines(rank_events_path(run_dir, world.rank)) as events:
        try:
            with Trainer(load_task(job), job, world=world) as trainer:
                write_placement(run_dir, world.rank, rows_of(trainer))
        except BaseException as error:
            events.event("failed", **failure_of(error, 0, None))
            return exit_code_of(error)
    return 0


class _Run(Callback):
    """What `main` keeps while it trains: the record of this rank."""

    def __init__(self, job: Job, world: World, events: JsonLines) -> None:
        self.job, self.world, self.events = job, world, events
        self.run_dir = Path(job.run_dir)
        self.trainer: Trainer | None = None
        self.metrics: JsonLines | None = None
        self.logs = Logs()
        self.keeping = Keeping(self.run_dir, events.event)
        self.last_step_at = 0.0
        self.first_step = True
        self.resumed_from: int | None = None
        self.seen_before = 0

    def train(self) -> None:
        """From the job to the event `done` with its summary, or `stopped` with its checkpoint."""
        task = load_task(self.job)
        kind = ServedTrainer if self.world.role == CHIEF else Trainer
        trainer = self.trainer = kind(
            task, self.job, world=self.world, report=self.events.event, callbacks=[self]
        )
        self.events.event(
            "ready",
            host=socket.gethostname(),
            swapped=trainer.built.swapped,
            not_pretrained=[],
            machine=facts(self.job),
        )
        trainer.rehearse()
        if trainer.task_data.notes and self.world.is_leader:
            self.events.event("data_notes", notes=trainer.task_data.notes)
        self.resumed_from = trainer.resume()
        self.seen_before = trainer.progress.samples_seen
        write_placement(self.run_dir, self.world.rank, rows_of(trainer))
        if self.world.is_leader:
            self.metrics = open_metrics(self.run_dir, trainer.progress.batch_index)
            self.logs = open_logs(self.job, trainer.progress.batch_index)
        trainer.comm.barrier()
        trainer.faults.reach("start")
        start = self.last_step_at = time.perf_counter()
        came_to_the_end = fit(trainer)
        seconds = self.last_step_at - start
        if came_to_the_end:
            self._conclude(trainer, seconds)
        else:
            self._stop(trainer)

    def _conclude(self, trainer: Trainer, seconds: float) -> None:
        if self.world.is_leader:
            self._save_weights(trainer)
        evaluation = trainer.evaluate()
        self._close_files()
        summary = self._summary(trainer, seconds, evaluation)
        trainer.close()
        self.events.event("done", summary=summary, seconds=trainer.pulse.seconds)
        trainer.pulse.enter("done")
        trainer.faults.reach("done")

    def _save_weights(self, trainer: Trainer) -> None:
        """`weights.safetensors`, of a copy of all weights."""
        taken = Snapshot()
        taken.take(dict(trainer.weights()))
        parts = taken.layout.header, taken.data
        self.keeping.whole(
            "weights.safetensors",
            lambda paths: write_where_room_is(
                paths, sum(map(len, parts)), lambda file: file.writelines(parts)
            ),
        )

    def _stop(self, trainer: Trainer) -> None:
        """Asked to stop: the checkpoint is committed, or could not be."""
        self._close_files()
        committed = trainer.save(in_a_hurry=True)  # the same step: known to all, not written again
        trainer.close()
        step = trainer.progress.batch_index
        self.events.event("stopped", step=step, checkpoint=committed)
        trainer.pulse.enter("done")

    def _close_files(self) -> None:
        if self.metrics is not None:
            self.keeping.rest("metrics.jsonl", self.metrics.close_with_rest())
        self.keeping.incomplete += self.logs.close()
        if self.world.is_leader:
            path = rank_events_path(self.run_dir, self.world.rank)
            self.keeping.rest(path.name, self.events.take_waiting())

    def on_save(self, trainer: Trainer) -> None:
        """No step is saved that the metrics do not know."""
        if self.metrics is not None:
            self.metrics.flush()
        self.logs.flush()

    def on_evaluation(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Record an evaluation on the way."""
        step = trainer.progress.batch_index
        if self.world.is_leader:
            best = trainer.course.is_best
            self.events.event("evaluated", step=step, metrics=metrics, best=best)
        self.logs.evaluation(step, metrics)

    def on_step(self, trainer: Trainer, batch: Batch, result: StepResult) -> None:
        """Record a step."""
        self.last_step_at = time.perf_counter()
        if self.first_step:
            self.first_step = False
            total = trainer.total_steps
            self.events.event("training", step=result.batch_index, total_steps=total)
        if result.bad and self.world.is_leader:
            told = {"bad": result.bad, "culprits": result.culprits}
            self.events.event("bad_step", step=result.batch_index, **told)
        if self.metrics is not None:
            row = row_of(result)
            self.metrics.row(row)
            self.logs.row(row)

    def _summary(
        self, trainer: Trainer, seconds: float, evaluation: dict[str, float]
    ) -> dict[str, Any]:
        done = trainer.progress
        seen = done.samples_seen - self.seen_before
        size = sum(array.nbytes for _, array in trainer.weights())
        fits = size <= DIGEST_LIMIT_BYTES
        return {
            "world_size": trainer.job.ranks,
            "nodes": self.job.nodes,
            "strategy": self.job.strategy,
            "engine": self.job.engine,
            "steps": done.updates,
            "train_loss": done.mean_loss,
            "eval": evaluation,
            "samples_per_s": seen / seconds if seen else None,
            "flops_per_sample": None,
            "mfu": None,
            "weights_sha256": digest_of_weights(_contents(trainer)) if fits else None,
            "restarts": 0,
            "resumed_from_step": self.resumed_from,
            "sent_bytes": None,  # TensorFlow sends them itself, and counts none
            "card_bytes_per_step": trainer.strategy.promised_bytes(trainer.graphs.message_bytes),
            "ended_early": trainer.course.is_over,
            "user_randomness": trainer.built.swapped["user_randomness"],
            "user_buffers": trainer.own_writes.names,
            **self.keeping.to_data(),
        }


def _contents(trainer: Trainer) -> Iterator[tuple[str, str, memoryview]]:
    for name, array in trainer.weights():
        flat = np.ascontiguousarray(array).reshape(-1)
        yield name, array.dtype.name, flat.view(np.uint8).data
