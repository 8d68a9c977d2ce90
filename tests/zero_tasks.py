"""What runs in the ranks of the tests of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, Optimizer

from allranks.job.job import Job
from allranks.job.placement import PARAMETER
from allranks.launcher.world import World
from allranks.torch import Task, Trainer
from contract_tasks import made


class _Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh() * self.scale.exp())


@dataclass(kw_only=True)
class Scaled(Task):
    """A parameter of no dimension, clipping that always bites, and an average."""

    batch_size: int = 16
    width: int = 10
    clip_norm: float | None = 0.05
    ema: float | None = 0.9

    def model(self) -> nn.Module:
        return _Scaled(self.width)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = made(64, 4)
        return inputs, inputs.sum(1)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


@dataclass(kw_only=True)
class Chosen(Scaled):
    """An optimizer that is chosen by what the weights are, or that sets them."""

    by: str = "shape"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.by == "draws":
            nn.init.normal_(model[0].weight)  # type: ignore[index, arg-type, union-attr]
        if self.by == "numbers":
            rates = [0.1 * float(p.detach().norm()) for p in model.parameters()]
        elif self.by == "arrays":
            rates = [0.1 * float(abs(p.detach().numpy()).max()) for p in model.parameters()]
        else:
            rates = [p.numel() / p.size(0) / p.shape[-1] / len(p) for p in model.parameters()]
        pairs = zip(model.parameters(), rates, strict=True)
        groups = [{"params": [p], "lr": rate} for p, rate in pairs]
        return Adagrad(groups, initial_accumulator_value=0.1)


def keeps_its_part(argument: dict[str, Any]) -> None:
    """After a step: the moments of own rows alone; gradients nowhere; the weights whole."""
    job = {"strategy": argument["strategy"]}
    with Trainer(Scaled(), Job(**job), world=World.from_environment()) as trainer:
        trainer.step(next(trainer.batches()))
        rank, step = trainer.world.rank, trainer.strategy.step
        weights = dict(step.model.named_parameters())
        moments = {n: step.optimizer.state[p]["exp_avg"].shape for n, p in weights.items()}
        rows = {0: 4, 1: 4, 2: 2}[rank]
        assert moments["first.weight"] == (rows, 4) and moments["first.bias"] == (rows,)
        assert moments["second.weight"] == (1 if rank == 0 else 0, 10)
        assert moments["scale"] == ()
        assert weights["first.weight"].shape == (10, 4)
        assert all(parameter.grad is None for parameter in weights.values())
        rows_held = trainer.strategy.placement(updated=True)
        held = {row.name: row for row in rows_held if row.kind == PARAMETER}
        row = 4 * weights["first.weight"].element_size()
        held_rows = 10 if argument["strategy"] == "zero1" else rows
        assert held["first.weight"].gradient_bytes == held_rows * row
        assert held["first.weight"].optimizer_bytes == 2 * rows * row + 4  # and the step's number


def steps_without_a_pass(argument: dict[str, Any]) -> None:
    """A batch that somebody has made by hand: no rank has a sample of it, and none goes through."""
    with Trainer(Scaled(), Job(**argument), world=World.from_environment()) as trainer:
        batch = next(trainer.batches())
        leaves = tuple(replace(leaf, micros=()) for leaf in batch.leaves)
        empty = replace(batch, leaves=leaves, ids=batch.ids[:0], passes=0, spare=None)
        before = [p.detach().clone() for p in trainer.strategy.model.parameters()]
        result = trainer.strategy.train_step(empty)
        assert (result.samples, result.updated) == (0, False)
        after = list(trainer.strategy.model.parameters())
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert trainer.step(batch).samples == 16
