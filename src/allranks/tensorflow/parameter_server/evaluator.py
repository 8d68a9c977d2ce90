"""The evaluator of a job with servers: it judges each checkpoint while the training goes on.

It evaluates the weights of each newest checkpoint in one process, each sample once, and writes the
event `evaluated`. Which checkpoints those are, `training/work_queue.py` says.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

from allranks.checkpoint.array_snapshot import read_checkpoint
from allranks.checkpoint.format import Manifest
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.tensorflow.build import build
from allranks.tensorflow.data.task_data import TaskData
from allranks.tensorflow.machine import set_arithmetic
from allranks.tensorflow.names import set_weights
from allranks.tensorflow.rendezvous import meet
from allranks.tensorflow.strategies.base import StrategyContext
from allranks.tensorflow.strategies.one_process import Single
from allranks.training.keras_task import Task
from allranks.training.work_queue import checkpoints_to_evaluate


def evaluate_checkpoints(task: Task, job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` until its chief is done."""
    heartbeat = Heartbeat(world.heartbeat, world.local_rank, world.local_size)
    meet(world).close()  # nobody calls it, but the others wait until all are there
    set_arithmetic(job)
    alone = Single(StrategyContext(task, job, world, {}))
    built = build(task, job, alone)
    data = TaskData(task, job, alone, built.model)
    events.event("ready", host=socket.gethostname(), role=world.role, index=world.role_index)
    evaluated = 0
    found = checkpoints_to_evaluate(Path(job.run_dir), world, heartbeat, _weights, events)
    for (step, digest), weights in found:
        set_weights(built.model, weights)
        metrics = data.evaluate(partial(heartbeat.enter, "evaluate"))
        events.event("evaluated", step=step, digest=digest, metrics=metrics, best=False)
        evaluated += 1
    data.close()
    events.event("done", evaluated=evaluated)


def _weights(folder: Path, manifest: Manifest) -> Any:
    return read_checkpoint(folder, manifest).common["model"]
