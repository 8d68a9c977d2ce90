"""What one rank of `pipeline_bubble.py` and `branches.py` does: it trains layers that sleep."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Task, Trainer

WARM = 1  # step that is not counted: shapes are told, groups are made


slept_s = [0.0]  # of this rank, as measured: on a busy machine it is more than was asked for


def sleep(seconds: float) -> None:
    """Sleep, and count how long it was."""
    began = time.perf_counter()
    time.sleep(seconds)
    slept_s[0] += time.perf_counter() - began


class Slow(torch.autograd.Function):
    """Sleeps in forward, and as long in backward, on the way to the inputs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.seconds)
        return gradient, None


class SlowGradient(torch.autograd.Function):
    """A weight whose gradient takes as long again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.seconds)
        return gradient, None


class Layer(nn.Linear):
    """A small layer that takes its time, as much for each product of matrices."""

    def __init__(self, seconds: float) -> None:
        super().__init__(8, 8)
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        late: Any = SlowGradient.apply
        slow: Any = Slow.apply
        output: Tensor = slow(
            F.linear(values, late(self.weight, self.seconds), self.bias), self.seconds
        )
        return output


@dataclass(kw_only=True)
class Sleeping(Task):
    """`layers` of them in a row."""

    layers: int = 8
    seconds: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(*(Layer(self.seconds) for _ in range(self.layers)))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e-3)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.ones(320, 8), torch.zeros(320, 8)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().sum(1)


class Heads(nn.Module):
    """A trunk, and branches behind it that take their time."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(Layer(each) for each in seconds)

    def forward(self, values: Tensor) -> Tensor:
        values = self.trunk(values)
        return torch.stack([head(values) for head in self.heads]).sum(0)


@dataclass(kw_only=True)
class SleepingBranches(Sleeping):
    """Branches that take as many seconds each."""

    heads: list[float]

    def model(self) -> nn.Module:
        return Heads(self.heads)

    def branches(self, model: nn.Module) -> list[str]:
        return [f"heads.{number}" for number in range(len(self.heads))]


def train(
    rank: int,
    folder: str,
    strategy: str,
    *,
    ranks: int,
    micros: int,
    layers: int,
    steps: int,
    forward_s: float,
) -> None:
    """Train some steps of layers in a row."""
    sizes: dict[str, Any] = {"batch_size": 4 * micros, "shards": micros, "epochs": 100}
    task = Sleeping(layers=layers, seconds=forward_s, **sizes)
    timed_steps(rank, folder, strategy, task, ranks=ranks, steps=steps)


def timed_steps(
    rank: int, folder: str, strategy: str, task: Task, *, ranks: int, steps: int
) -> None:
    """Train some steps; every rank writes how long each took, and its layers in it."""
    torch.set_num_threads(1)
    world = World(rank, ranks, rank, ranks, store=f"{folder}/store")
    found = []
    with Trainer(task, Job(strategy=strategy, witness="off"), world=world) as trainer:
        for batch in trainer.batches(steps=steps + WARM):
            began, slept_s[0] = time.perf_counter(), 0.0
            trainer.step(batch)
            found.append((time.perf_counter() - began, slept_s[0]))
    Path(folder, f"steps-{rank}.json").write_text(json.dumps(found[WARM:]))
