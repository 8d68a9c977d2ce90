"""A task whose class numbers follow the order of a set of texts, as many scripts have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.torch import Task
from contract_tasks import made

NAMES = [f"class {number}" for number in range(12)]


@dataclass(kw_only=True)
class Named(Task):
    """Twelve classes, numbered by a set."""

    batch_size: int = 24

    def model(self) -> nn.Module:
        return nn.Linear(6, len(NAMES))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.5)

    def train_data(self) -> tuple[Tensor, Tensor]:
        numbers = {name: number for number, name in enumerate(set(NAMES))}
        inputs = made(48, 6)
        return inputs, torch.tensor([numbers[NAMES[row % len(NAMES)]] for row in range(48)])

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")
