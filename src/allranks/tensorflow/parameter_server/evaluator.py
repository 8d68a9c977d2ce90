"""The evaluator of a job with servers: it judges each checkpoint while the training goes on.

It takes the newest committed checkpoint of the run folder, evaluates it in one process, each sample
once, and writes the event `evaluated`. Checkpoints that came and went meanwhile are passed over.
When the chief is done, the last one is still evaluated. It reads the checkpoints and changes none.
"""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

from allranks.checkpoint.array_snapshot import read_checkpoint
from allranks.checkpoint.folder import committed, step_of, verify_files
from allranks.checkpoint.manifest import BadCheckpoint, read_manifest
from allranks.job.job import Job
from allranks.job.resume import CHECKPOINTS
from allranks.job.run_folder import JsonLines, rank_events_path, read_rows
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.strategies.roles import LEADER
from allranks.tensorflow.build import build
from allranks.tensorflow.data.task_data import TaskData
from allranks.tensorflow.machine import set_arithmetic
from allranks.tensorflow.names import set_weights
from allranks.tensorflow.rendezvous import meet
from allranks.tensorflow.strategies.base import StrategyContext
from allranks.tensorflow.strategies.one_process import Single
from allranks.training.keras_task import Task

EVALUATOR = "evaluator"
LOOK_S = 0.1
ENDED = ("done", "stopped")


def evaluate_checkpoints(task: Task, job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` until its chief is done."""
    heartbeat = Heartbeat(world.heartbeat, world.local_rank, world.local_size)
    meet(world).close()  # nobody calls it, but the others wait until all are there
    set_arithmetic(job)
    alone = Single(StrategyContext(task, job, world, {}))
    built = build(task, job, alone)
    data = TaskData(task, job, alone, built.model)
    events.event("ready", host=socket.gethostname(), role=world.role, index=world.role_index)
    run_dir = Path(job.run_dir)
    done = _evaluated_before(run_dir, world.rank)
    while True:
        is_last = heartbeat.wants_stop or _has_ended(run_dir, world.attempt)  # before it looks
        heartbeat.enter("exchange")
        for step, weights in _newest(run_dir / CHECKPOINTS, done):
            done.add(step)
            heartbeat.at_step(step)
            heartbeat.enter("evaluate")
            set_weights(built.model, weights)
            metrics = data.evaluate(partial(heartbeat.enter, "evaluate"))
            events.event("evaluated", step=step, metrics=metrics, best=False)
        if is_last:
            break
        time.sleep(LOOK_S)
    data.close()
    events.event("done", evaluated=len(done))


def _newest(checkpoints: Path, done: set[int]) -> list[tuple[int, Any]]:
    """The newest checkpoint with its weights, if it is whole and was not evaluated yet."""
    for folder in committed(checkpoints)[:1]:
        if step_of(folder) in done:
            return []
        try:
            manifest = read_manifest(folder)
            if not verify_files(folder, manifest, manifest.files):
                return [(manifest.step, read_checkpoint(folder, manifest).common["model"])]
        except (
            BadCheckpoint,
            FileNotFoundError,
        ):  # it went while it was read: there is a newer one
            return []
    return []


def _evaluated_before(run_dir: Path, rank: int) -> set[int]:
    rows = read_rows(rank_events_path(run_dir, rank))
    return {int(row["step"]) for row in rows if row["event"] == "evaluated"}


def _has_ended(run_dir: Path, attempt: int) -> bool:
    rows = read_rows(rank_events_path(run_dir, LEADER))
    return any(row["event"] in ENDED and row.get("attempt", 0) == attempt for row in rows)
