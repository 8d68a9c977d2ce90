"""Tasks of small models, for the tests of the models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.programs.models.vision import EfficientNet
from allranks.torch.task import Task


@dataclass(kw_only=True)
class Paths(Task):
    """A narrow EfficientNet: BatchNorm, dropout, and paths that are dropped for whole samples."""

    batch_size: int = 20
    shards: int = 4
    epochs: int = 10
    clip_norm: float | None = 1.0

    def model(self) -> nn.Module:
        return EfficientNet(width=0.25, depth=0.4, dropout=0.3, classes=3)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_data(self) -> tuple[Tensor, Tensor]:
        images = torch.randn(50, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        return images, torch.arange(50) % 3

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")
