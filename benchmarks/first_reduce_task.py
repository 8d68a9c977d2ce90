"""What `launch.py` has allranks train: the smallest model there is,
and the time of its second step.

The learning-rate schedule of a step is asked for before anything else in it, so when the leader
asks for that of the second step, the first all-reduce is over, and so is the update after it. The
scripts of the others (`first_reduce_script.py`) write the time right after the all-reduce, which
is a little earlier: in their favour.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from allranks.torch import Task


@dataclass(kw_only=True)
class FirstReduce(Task):
    """One linear layer. `first` is the file to which the leader writes the time."""

    batch_size: int = 8
    first: str = ""

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Tensor:
        return torch.ones(16, 8)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().flatten()

    def schedule(self, step: int) -> float:
        if step == 1 and os.environ["RANK"] == "0":  # a measurement may know its rank; a task not
            now = time.monotonic()
            Path(self.first).write_text(f"{now} {os.environ['WORLD_SIZE']}")
        return 1.0
