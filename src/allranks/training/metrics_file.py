"""`metrics.jsonl`: a row for every step, written by the leader of a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from allranks.job.run_folder import JsonLines, keep_rows
from allranks.training.progress import StepResult


def open_metrics(run_dir: Path, step: int) -> JsonLines:
    """The metrics so far, without steps that a checkpoint at `step` does not know of."""
    path = run_dir / "metrics.jsonl"
    keep_rows(path, lambda row: int(row["step"]) < step)
    return JsonLines(path)


def row_of(result: StepResult) -> dict[str, Any]:
    """What is written of a step; what it does not have is left out."""
    row: dict[str, Any] = {
        "step": result.batch_index,
        "epoch": result.epoch,
        "loss": result.loss,
        "samples": result.samples,
        "learning_rate": result.learning_rate,
        "monotonic": time.monotonic(),
    }
    if result.grad_norm is not None:
        row["grad_norm"] = result.grad_norm
    if result.loss_scale is not None:
        row["loss_scale"] = result.loss_scale
    if result.bad:
        row["bad"] = result.bad
    return row
