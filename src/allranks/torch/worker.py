"""One rank of a job: a job comes in, a record goes out. Started by the launcher, by name.

`describe` loads the task and says what a place must know of it; `main` trains; `place` sets the
rank up as `main` does, and says what it holds. A failure is written as an event before the process
leaves, so that the supervisor can tell who was first.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import torch

from allranks.errors import AllranksError
from allranks.job.config import threads_per_rank
from allranks.job.job import Job
from allranks.job.placement import write_placement
from allranks.job.run_folder import JsonLines, rank_events_path
from allranks.launcher.world import World
from allranks.torch.data.batch import Batch
from allranks.torch.data.sources import seed_generators
from allranks.torch.fit import fit
from allranks.torch.keras.task import torch_task
from allranks.torch.machine import check_devices, facts
from allranks.torch.model.digest import weights_sha256
from allranks.torch.model.placement import RecordPlacement, update_by_nothing
from allranks.torch.model.weights_file import WeightsFile
from allranks.torch.profiling import Profiling
from allranks.torch.task import Task
from allranks.torch.trainer import Trainer
from allranks.torch.witness.trace import Trace
from allranks.training.callback import Callback
from allranks.training.failure import exit_code_of, failure_of
from allranks.training.keeping import Keeping
from allranks.training.keras_task import Task as KerasTask
from allranks.training.logs import Logs, check_logs, open_logs, open_metrics, row_of
from allranks.training.progress import StepResult
from allranks.training.task_fields import shape_of, task_of

DIGEST_LIMIT_BYTES = 16 * 2**30


def load_task(job: Job) -> Task:
    """The task of a job with its fields set, in torch's form if it is Keras'; raises `RequestError`."""
    seed_generators(job.seed)  # a fork inherits or reseeds them, each in another way
    found: Any = task_of(job, Task, KerasTask)
    return torch_task(found, job.precision)


def describe(argument: dict[str, Any]) -> int:
    """Load the task and write the event `described`, or `failed`."""
    job = Job.from_data(argument)
    with JsonLines(rank_events_path(Path(job.run_dir), 0)) as events:
        try:
            task = load_task(job)
            check_devices(job, job.ranks if job.nodes == 1 else 1)  # each rank looks for its own
            check_logs(job)
        except AllranksError as error:
            events.event("failed", **failure_of(error, 0, None))
            return error.exit_code
        events.event("described", shape=shape_of(task))
    return 0


def main(argument: dict[str, Any]) -> int:
    """Train as one rank; returns the exit code of the process."""
    job, world = Job.from_data(argument), World.from_environment()
    torch.set_num_threads(threads_per_rank(job, world.on_machine or world.local_size))
    path = rank_events_path(Path(job.run_dir), world.rank)
    with JsonLines(path, attempt=world.attempt) as events:
        run = _Run(job, world, events)
        try:
            run.train()
        except BaseException as error:
            step = run.trainer.progress.batch_index if run.trainer else None
            updates = run.trainer.progress.updates if run.trainer else 0
            events.event("failed", **failure_of(error, updates, step))
            return exit_code_of(error)
    return 0


def place(argument: dict[str, Any]) -> int:
    """Set this rank up, write what it will hold once it has made an update, and leave."""
    job, world = Job.from_data(argument), World.from_environment()
    torch.set_num_threads(threads_per_rank(job, world.on_machine or world.local_size))
    run_dir = Path(job.run_dir)
    with JsonLines(rank_events_path(run_dir, world.rank)) as events:
        try:
            with Trainer(load_task(job), job, world=world) as trainer:
                step = trainer.strategy.step
                update_by_nothing(step.parameters, step.optimizer, step.sparse.positions)
                write_placement(run_dir, world.rank, trainer.strategy.placement(updated=True))
                trainer.comm.barrier()
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
        self.trace: Trace | None = None
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
        report = self.events.event
        callbacks: list[Callback] = [self, RecordPlacement(self.run_dir)]
        if self.job.profile and self.world.is_leader:
            callbacks.append(Profiling(self.run_dir, report))
        trainer = self.trainer = Trainer(
            task,
            self.job,
            world=self.world,
            report=report,
            callbacks=callbacks,
        )
        built = trainer.built
        self.events.event(
            "ready",
            host=socket.gethostname(),
            swapped=built.swapped,
            not_pretrained=built.not_pretrained,
            machine=facts(self.job),
        )
        if trainer.model_notes and self.world.is_leader:
            self.events.event("model_notes", notes=trainer.model_notes)
        if self.job.trace:
            trace = self.run_dir / "trace"
            self.trace = Trace(trace, self.world.rank, trainer.strategy, self.job)
            trainer.job = dataclasses.replace(trainer.job, steps=self.trace.steps)
        trainer.rehearse()
        if trainer.task_data.notes and self.world.is_leader:
            self.events.event("data_notes", notes=trainer.task_data.notes)
        self.resumed_from = trainer.resume()
        self.seen_before = trainer.progress.samples_seen
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
        if self.trace is not None:
            self.trace.complete()
        trainer.witness.compare_replicas()
        self._save_weights(trainer)
        evaluation = trainer.evaluate()
        self._close_files()
        summary = self._summary(trainer, seconds, evaluation)
        trainer.comm.barrier()
        trainer.close()
        self.events.event("done", summary=summary, seconds=trainer.pulse.seconds)
        trainer.pulse.enter("done")
        trainer.faults.reach("done")

    def _stop(self, trainer: Trainer) -> None:
        """Asked to stop: the checkpoint is committed, or could not be."""
        self._close_files()
        committed = trainer.save(in_a_hurry=True)  # the same step: known to all, not written again
        trainer.comm.barrier()
        trainer.close()
        step = trainer.progress.batch_index
        self.events.event("stopped", step=step, checkpoint=committed)
        trainer.pulse.enter("done")

    def _close_files(self) -> None:
        if self.metrics is not None:
            self.keeping.rest("metrics.jsonl", self.metrics.close_with_rest())
        if self.trace is not None:
            self.trace.close()
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
        """Record an evaluation on the way: the leader's, or each rank's own."""
        if self.world.is_leader or not trainer.strategy.agreement.is_one_training:
            step, best = trainer.progress.batch_index, trainer.course.is_best
            self.events.event("evaluated", step=step, metrics=metrics, best=best)
        self.logs.evaluation(trainer.progress.batch_index, metrics)

    def on_step(self, trainer: Trainer, batch: Batch, result: StepResult) -> None:
        """Record a step."""
        if self.trace is not None:
            self.trace.finished(batch, result)
        self.last_step_at = time.perf_counter()
        if self.first_step:
            self.first_step = False
            total = trainer.total_steps
            self.events.event("training", step=result.batch_index, total_steps=total)
        alone = not trainer.strategy.agreement.is_one_training
        if result.bad and (self.world.is_leader or alone):
            told = {"bad": result.bad, "culprits": result.culprits}
            self.events.event("bad_step", step=result.batch_index, **told)
        if self.metrics is None:
            return
        row = row_of(result)
        self.metrics.row(row)
        self.logs.row(row)

    def _summary(
        self, trainer: Trainer, seconds: float, evaluation: dict[str, float]
    ) -> dict[str, Any]:
        size = sum(tensor.nbytes for _, tensor in trainer.weights())
        digest = weights_sha256(trainer.weights()) if size <= DIGEST_LIMIT_BYTES else None
        done = trainer.progress
        seen = torch.tensor(
            [done.samples_seen - self.seen_before], dtype=torch.float64, device=trainer.device
        )
        if not trainer.strategy.agreement.is_one_training:  # each rank has counted its own
            trainer.comm.all_reduce(seen, "control").wait()
        samples_per_s = float(seen) / seconds if float(seen) else None
        return {
            "world_size": self.world.size,
            "nodes": self.job.nodes,
            "strategy": self.job.strategy,
            "steps": done.updates,
            "train_loss": done.mean_loss,
            "eval": evaluation,
            "samples_per_s": samples_per_s,
            "flops_per_sample": trainer.meter.flops_per_sample,
            "mfu": trainer.meter.utilisation(samples_per_s, self.world.size),
            "weights_sha256": digest,
            "restarts": 0,
            "resumed_from_step": self.resumed_from,
            "sent_bytes": {kind: round(sent) for kind, sent in trainer.comm.sent.items()},
            "card_bytes_per_step": trainer.strategy.promised_bytes(),
            "ended_early": trainer.course.is_over,
            "user_randomness": trainer.built.swapped["user_randomness"],
            "user_buffers": trainer.user_buffers,
            "model_notes": trainer.model_notes,
            "bitwise": self.job.bitwise,
            "witness": trainer.witness.testimony.to_data(),
            **self.keeping.to_data(),
        }

    def _save_weights(self, trainer: Trainer) -> None:
        """`weights.safetensors`, and `average.safetensors` where there is a moving average.

        Every rank calls this: whole weights are put together by all ranks that hold parts of them.
        """
        self._write("weights.safetensors", trainer)
        average = trainer.strategy.step.average
        if average is not None:
            with average.in_place():
                self._write("average.safetensors", trainer)

    def _write(self, name: str, trainer: Trainer) -> None:
        weights = trainer.weights()
        if self.world.is_leader:
            file = WeightsFile(trainer.strategy.model, trainer.strategy.as_saved)
            self.keeping.whole(name, lambda paths: file.write(paths, weights))
        for _ in weights:
            pass
