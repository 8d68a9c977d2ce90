"""What `restart.py` has allranks train: it notes when each part of a start is reached, and kills.

In every attempt but the last, one rank kills itself with SIGKILL at the begin of a step, after it
has noted the time. Which rank, and when, follows from the attempt.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from workloads import WORKLOADS

from allranks.torch import Task


@dataclass(kw_only=True)
class Killed(Task):
    """A workload of `workloads.py`. `notes` is a folder; `every` as in --checkpoint-every."""

    workload: str = "tiny MLP"
    notes: str = ""
    every: int = 4
    kills: int = 1
    batch_size: int = 32

    def __post_init__(self) -> None:
        self.note("task")

    def model(self) -> nn.Module:
        self.note("joined")
        model = WORKLOADS[self.workload].model()
        self.note("built")
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        self.note("broadcast")
        return WORKLOADS[self.workload].optimizer(model)

    def train_data(self) -> tuple[Tensor, Tensor]:
        data = WORKLOADS[self.workload].data()
        self.note("data")
        return data

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def schedule(self, step: int) -> float:
        attempt = int(os.environ["ALLRANKS_ATTEMPT"])
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        is_time = step == self.every * (attempt + 1) + self.every // 2
        if attempt < self.kills and is_time and rank == (attempt + 1) % ranks:
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    def note(self, what: str) -> None:
        """Write down when this rank is here; a measurement may know its rank, a task not."""
        rank, attempt = os.environ.get("RANK"), os.environ.get("ALLRANKS_ATTEMPT")
        if rank is None or attempt is None:  # loaded to be described
            return
        row = {"attempt": int(attempt), "what": what, "monotonic": time.monotonic()}
        with open(Path(self.notes) / f"{rank}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
