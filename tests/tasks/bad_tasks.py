"""Tasks that are wrong in one thing each, for the tests of bad requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.torch.task import Task


@dataclass(kw_only=True)
class Good(Task):
    """A linear model of 40 made-up samples; every other task here changes one thing of it."""

    batch_size: int = 16
    lr: float = 0.1
    clip_norm: float | None = 1.0
    order: Literal["up", "down"] = "up"

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(40, 3, generator=generator), torch.arange(40) % 2

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class ScalarLoss(Good):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1])


class NumberLoss(Good):
    def loss(self, output: Tensor, batch: Any) -> Any:
        return 0.5


class TransposedLoss(Good):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none").expand(3, -1)


class WrongWeight(Good):
    def weight(self, batch: Any) -> Tensor:
        return torch.ones(len(batch[1]), 1)


class NoWeight(Good):
    def weight(self, batch: Any) -> Tensor:
        return torch.zeros(len(batch[1]))


class NumberWeight(Good):
    def weight(self, batch: Any) -> Any:
        return 1.0


class NoPair(Good):
    def metrics(self, output: Tensor, batch: Any) -> Any:
        return {"accuracy": 0.5}


class NoModule(Good):
    def model(self) -> Any:
        return lambda x: x


class OtherOptimizer(Good):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([nn.Parameter(torch.zeros(1))], lr=self.lr)


class NoOptimizer(Good):
    def optimizer(self, model: nn.Module) -> Any:
        return None


class NoData(Good):
    def train_data(self) -> Any:
        return torch.zeros(0, 3), torch.zeros(0)


class UnevenData(Good):
    def train_data(self) -> Any:
        return torch.zeros(4, 3), torch.zeros(5)


class StrangeData(Good):
    def train_data(self) -> Any:
        return 3


class Normed(Good):
    """With BatchNorm, so that a shard cannot be cut."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Synchronised(Good):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))


class NoLoss(Task):
    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Any:
        return torch.zeros(4, 3)


@dataclass(kw_only=True)
class FailsWhenMade(Good):
    def __post_init__(self) -> None:
        raise ValueError("lr and order do not go together")


class Sets(Good):
    """Nothing wrong: two sets to evaluate on."""

    def eval_data(self) -> Any:
        return {"a": self.train_data(), "b": [(torch.ones(3), torch.tensor(1))] * 5}

    def metrics(self, output: Tensor, batch: Any) -> Any:
        hits = output.argmax(1) == batch[1]
        return {"hits": (hits.sum(), len(hits))}


class Misspelt(Good):
    def shedule(self, step: int) -> float:
        return self.shedule(step - 1) if step else 0.0  # that it calls itself is no use


class Diverges(Good):
    """No mistake that can be refused: the loss is not a number."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) * float("nan")
