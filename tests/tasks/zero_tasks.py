"""What runs in the ranks of the tests of ZeRO."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from allranks.job.job import Job
from allranks.job.place import PARAMETER
from allranks.launcher.world import World
from allranks.torch import Task, Trainer
from allranks.torch.data.batch import Batch
from allranks.training.callback import Callback
from allranks.training.progress import StepResult
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


class _Sum(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([made(4, 4) for _ in range(tensors)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.stack([*self.parts]).sum(0)


class _Calls(Callback):
    """How many functions the third step of rank 0 calls: of Python, and of C."""

    def __init__(self, out: str) -> None:
        self.out, self.calls = out, Counter[str]()

    def on_step(self, trainer: Any, batch: Batch, result: StepResult) -> None:
        sys.setprofile(None)
        if batch.index == 2 and trainer.comm.rank == 0:
            Path(self.out).write_text(json.dumps(self.calls))
        self.calls.clear()
        sys.setprofile(lambda frame, event, argument: self.calls.update([event]))

    def on_end(self, trainer: Any) -> None:
        sys.setprofile(None)


@dataclass(kw_only=True)
class ManyTensors(Scaled):
    """So many weights of 4x4."""

    tensors: int = 20
    clip_norm: float | None = None
    ema: float | None = None
    out: str = ""

    def model(self) -> nn.Module:
        return _Sum(self.tensors)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e-3, foreach=True)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.sum(1) - batch[1]).square()

    def callbacks(self) -> list[Callback]:
        return [_Calls(self.out)]


class _Moves(Callback):
    """After the first step a weight lies elsewhere; after the next one another is turned there."""

    def on_step(self, trainer: Any, batch: Batch, result: StepResult) -> None:
        first, second = trainer.strategy.model.parts[:2]
        if batch.index == 0:
            first.data = first.data.clone()
        if batch.index == 1:
            second.data = second.data.t()


@dataclass(kw_only=True)
class MovedWeights(ManyTensors):
    """Weights that are replaced between steps."""

    tensors: int = 3

    def callbacks(self) -> list[Callback]:
        return [_Moves()]


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
