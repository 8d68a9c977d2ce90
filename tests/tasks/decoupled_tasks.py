"""A task whose learners a plain loop can follow: linear, dropout-free, SGD with momentum."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from allranks.torch import Task

SAMPLES, BATCH = 96, 16


def made() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@dataclass(kw_only=True)
class Plain(Task):
    """Twelve steps of two epochs; no layer draws anything."""

    batch_size: int = BATCH
    shards: int = 4
    epochs: int = 2

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.5)

    def train_data(self) -> Any:
        inputs = made()
        return inputs, inputs.sin().sum(1)

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


@dataclass(kw_only=True)
class Freezes(Plain):
    """Its first layer is trained no more from the third batch of each process on."""

    def model(self) -> nn.Module:
        self.batches, self.made = 0, super().model()
        return self.made

    def inputs(self, batch: Any) -> Any:
        self.batches += torch.is_grad_enabled()
        if self.batches == 3:
            self.made.get_submodule("0").requires_grad_(False)
        return batch[0]


class Clamping(nn.Linear):
    """Keeps its weight small by itself, as critics do; `unseen` by torch's count of writes."""

    unseen = False

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.unseen else self.weight).clamp_(-0.3, 0.3)
        return super().forward(input)


@dataclass(kw_only=True)
class Clamps(Plain):
    """Writes a weight in each forward pass."""

    unseen: bool = False

    def model(self) -> nn.Module:
        first = Clamping(6, 5)
        first.unseen = self.unseen
        return nn.Sequential(first, nn.Tanh(), nn.Linear(5, 1))


@dataclass(kw_only=True)
class Noted(Plain):
    """Writes down, learner by learner, which samples a step has seen, in `notes`."""

    notes: str = ""
    epochs: int = 12

    def train_data(self) -> Any:
        inputs = made()
        return inputs, inputs.sin().sum(1), torch.arange(SAMPLES)

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self.notes and torch.is_grad_enabled():
            with open(Path(self.notes) / str(os.getpid()), "a") as file:
                file.write(json.dumps(batch[2].tolist()) + "\n")
        return (output.squeeze(1) - batch[1]).square()


@dataclass(kw_only=True)
class OneSample(Plain):
    """What many do with a new model first: overfit one sample."""

    def train_data(self) -> Any:
        inputs, targets = super().train_data()
        return [(inputs[0], targets[0])]


class Steep(Plain):
    """The loss is zero, and its gradient is infinite."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) * 0).abs().sqrt()
