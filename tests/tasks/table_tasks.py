"""Trainings with tables of sparse gradients, for parameter servers that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from allranks.torch.optimizers.rowwise_adagrad import RowwiseAdagrad
from allranks.torch.task import Task

ROWS, SAMPLES = 60, 88
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda weights: SGD(weights, lr=0.5),
    "momentum": lambda weights: SGD(weights, lr=0.5, momentum=0.9),
    "Adagrad": lambda weights: Adagrad(weights, lr=0.1, lr_decay=0.1),
    "RowwiseAdagrad": lambda weights: RowwiseAdagrad(weights, lr=0.1),
    "SparseAdam": lambda weights: SparseAdam(weights, lr=0.05),
}


class Lookups(nn.Module):
    """Two layers that share a table, a bag, and a dense layer or none."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 3, sparse=True)
        self.padded = nn.Embedding(ROWS, 3, sparse=True, padding_idx=2)
        self.padded.weight = self.words.weight
        self.bag = nn.EmbeddingBag(ROWS + 7, 3, mode="mean", sparse=True)
        self.last = nn.Linear(3, 3) if dense else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids).mean(1) + self.padded(ids.flip(1)[:, :2]).tanh().sum(1)
        score: Tensor = self.last(found + self.bag(ids + 3))
        return score


@dataclass(kw_only=True)
class Tables(Task):
    """Clipped, at a rate that changes in each step, with an uneven last batch."""

    batch_size: int = 16
    epochs: int = 2
    shards: int = 4
    clip_norm: float | None = 0.3
    kind: str = "Adagrad"
    regularized: bool = False

    def model(self) -> nn.Module:
        return Lookups(dense=self.kind != "SparseAdam")

    def optimizer(self, model: Any) -> Optimizer:
        if self.kind == "left out":
            return SGD(model.last.parameters(), lr=0.5)
        return OPTIMIZERS[self.kind](model.parameters())

    def train_data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        ids = (ROWS ** torch.rand(SAMPLES, 4, generator=generator)).long()  # the first ones often
        return ids, ids.sum(1).remainder(3)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return self.train_data()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1], reduction="none")

    def schedule(self, step: int) -> float:
        return min(1.0, (step + 1) / 4)

    def regularizer(self, model: nn.Module) -> Tensor | None:
        if not self.regularized:
            return None
        weights: Any = model.words.weight
        found: Tensor = 1e-2 * weights.square().sum()
        return found
