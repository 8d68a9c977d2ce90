"""What allranks trains in `parameter_server.py`: a model of `sizes.py` on made-up samples; a table.

The peers on torch take layers and samples from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from sizes import LOOKED_UP, RATE, SAMPLES, SIZES, TABLE_DIM, TABLE_ROWS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.torch import Task


def layers(widths: tuple[int, ...]) -> nn.Sequential:
    """Dense layers with ReLU between them."""
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made[:-1])


def samples(widths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs (n, first width) and labels (n,)."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, widths[0], generator=random)
    return inputs, torch.randint(widths[-1], (SAMPLES,), generator=random)


@dataclass(kw_only=True)
class Dense(Task):
    """`size` is a name of `SIZES`."""

    size: str = "11 k weights"
    batch_size: int = 32
    epochs: int = 1000

    def model(self) -> nn.Module:
        return layers(SIZES[self.size].widths)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=RATE)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return samples(SIZES[self.size].widths)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


def table() -> nn.Module:
    """A table whose rows of a sample are added, and a dense layer after it."""
    return nn.Sequential(
        nn.EmbeddingBag(TABLE_ROWS, TABLE_DIM, mode="sum", sparse=True), nn.Linear(TABLE_DIM, 1)
    )


def lookups() -> tuple[Tensor, Tensor]:
    """Rows (n, rows of a sample), all equally likely, and targets (n, 1)."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(TABLE_ROWS, (SAMPLES * 4, LOOKED_UP), generator=random)
    return rows, torch.randn(SAMPLES * 4, 1, generator=random)


@dataclass(kw_only=True)
class Table(Task):
    """A regression on rows of a table of 1 GB."""

    batch_size: int = 512
    epochs: int = 1000

    def model(self) -> nn.Module:
        return table()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=RATE)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return lookups()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(dim=1)
