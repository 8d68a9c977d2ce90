"""The evaluator of a job with servers: it evaluates checkpoints while the training goes on.

It evaluates the newest checkpoint in this process alone, each sample once, and writes the event
`evaluated`. It does not communicate, so no process waits for it, and its death costs only time.
`training/work_queue.py` selects the checkpoints.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allranks.checkpoint.checkpointer import is_below, values_of
from allranks.checkpoint.format import Manifest, unflatten
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.world import World
from allranks.torch.checkpoint.plan import read_files
from allranks.torch.checkpoint.state import load_model_state
from allranks.torch.checkpoint.tree import DTYPES
from allranks.torch.trainer import Trainer
from allranks.training.work_queue import checkpoints_to_evaluate

MODEL = "common/model"


def evaluate_checkpoints(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` until its scheduler is done; `trainer` trains nothing."""
    events.event("ready", host=socket.gethostname(), role=world.role, index=world.role_index)
    model, evaluated = trainer.strategy.model, 0
    run_dir, heartbeat = Path(job.run_dir), trainer.heartbeat
    checkpoints = checkpoints_to_evaluate(run_dir, world, heartbeat, _model_state, events)
    for (step, digest), state in checkpoints:
        trainer.faults.reach("step", step)
        load_model_state(model, state)
        metrics = trainer.evaluate()
        events.event("evaluated", step=step, digest=digest, metrics=metrics, best=False)
        evaluated += 1
    events.event("done", evaluated=evaluated)
    trainer.heartbeat.enter("done")


def _model_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The weights and buffers in a checkpoint; the optimizer state is not read."""
    wanted = {path: saved for path, saved in manifest.tensors.items() if is_below(path, MODEL)}
    targets: dict[str, Tensor] = {
        path: torch.empty(saved.shape, dtype=DTYPES[saved.dtype]) for path, saved in wanted.items()
    }
    read_files(folder, wanted, targets)
    state: dict[str, Any] = unflatten(values_of(manifest)[0]["model"], targets)
    return state
