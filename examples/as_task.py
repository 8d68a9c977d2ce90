"""The training of `own_loop.py` as a task: `allranks train as_task.py --bitwise --ranks 2`."""

from dataclasses import dataclass
from typing import Any

import torch
from own_loop import waves
from torch import nn
from torch.nn import functional as F

from allranks.torch import Task


@dataclass(kw_only=True)
class Waves(Task):
    """Which side of a wave a point of the plane lies on."""

    batch_size: int = 200
    epochs: int = 5
    lr: float = 1e-2

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def train_data(self) -> Any:
        return waves(2000, seed=1)

    def eval_data(self) -> Any:
        return waves(500, seed=2)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")
