"""Two weights that get a gradient of 2 in every step: each learner moves by -2 on its own.

As in the tests of DiLoCo in torchft, one weight is a fragment of the model. The weights of a rank
are written down before each step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from allranks.torch import Task
from allranks.training.callback import Callback


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.ones(()))
        self.first = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * (self.first + self.second) * inputs


class WeightsAfter(Callback):
    """A line for each step: its number, and both weights after it."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder, f"weights-{os.environ.get('RANK', '0')}")

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        model = trainer.built.model
        with self.file.open("a") as file:
            print(result.batch_index + 1, model.first.item(), model.second.item(), file=file)


@dataclass(kw_only=True)
class Fragments(Task):
    batch_size: int = 8
    epochs: int = 100
    folder: str = ""
    rests: int = 0  # the first so many steps have a rate of 0

    def model(self) -> nn.Module:
        return TwoWeights()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1.0)

    def schedule(self, step: int) -> float:
        return float(step >= self.rests)

    def train_data(self) -> Tensor:
        return torch.ones(16)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output

    def callbacks(self) -> list[Callback]:
        return [WeightsAfter(self.folder)]
