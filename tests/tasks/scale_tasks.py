"""A task with BatchNorm and dropout whose steps take a while, until a file says that they need not.

A change of the ranks then comes in the middle of the training, on a fast and on a slow machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from allranks.launcher.world import World
from allranks.torch import Task
from allranks.torch.data.batch import Batch

PASS_S = 0.005


@dataclass
class Unhurried(Task):
    """Eight shards in a batch, each a pass of its own under `--bitwise`."""

    batch_size: int = 32
    epochs: int = 1000
    hurry: str = ""
    """The file with which a pass takes no longer than it must."""
    lies: bool = False
    """Whether rank 2 takes up another state of the optimizer than it was given."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if self.lies and World.from_environment().number == 2:
            first = next(model.parameters())
            optimizer.register_load_state_dict_post_hook(
                lambda loaded: loaded.state[first]["exp_avg"].add_(1)
            )
        return optimizer

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        return inputs, inputs[:, :3].argmax(1)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        inputs, classes = self.train_data()
        return inputs[:40], classes[:40]

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        if self.hurry and not os.path.exists(self.hurry):
            time.sleep(PASS_S)
        return functional.cross_entropy(output, batch[1], reduction="none")
