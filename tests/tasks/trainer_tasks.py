"""Tasks for what a training run needs: blocks, an average, evaluations that get worse,
callbacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import contract_tasks
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.training.callback import Callback


class Block(nn.Module):
    """BatchNorm and dropout around a linear layer; counts how often it is computed."""

    computed = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        Block.computed += 1
        out: Tensor = inputs + self.drop(torch.relu(self.norm(self.linear(inputs))))
        return out


class Residual(nn.Module):
    """Three blocks in an `nn.ModuleList`, between a first and a last layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(72, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        out = self.first(images.flatten(1))
        for block in self.blocks:
            out = block(out)
        result: Tensor = self.last(out)
        return result


@dataclass(kw_only=True)
class Blocks(contract_tasks.Images):
    """A residual net; `weights` is a file of pretrained weights,
    `frozen` leaves the first layer."""

    weights: str = ""
    frozen: bool = False
    lr: float = 1e-2

    def model(self) -> nn.Module:
        return Residual()

    def pretrained(self) -> Any:
        return self.weights or None

    def optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, Residual)
        if self.frozen:
            model.first.requires_grad_(False)
        return AdamW([p for p in model.parameters() if p.requires_grad], lr=self.lr)


@dataclass(kw_only=True)
class Worse(contract_tasks.Images):
    """Learns nothing, so that no evaluation is better than the first."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.0)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 3))


class Recorder(Callback):
    """Writes down what it is called for, one file for each rank."""

    def __init__(self, folder: str) -> None:
        self.folder, self.lines = Path(folder), list[str]()

    def on_start(self, trainer: Any) -> None:
        self.lines.append("start")

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        self.lines.append(f"step {batch.index}")

    def on_evaluation(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.lines.append(f"evaluation {sorted(metrics)}")

    def on_evaluation_start(self, trainer: Any) -> None:
        self.lines.append("before an evaluation")

    def on_evaluation_end(self, trainer: Any) -> None:
        self.lines.append("after it")

    def on_save(self, trainer: Any) -> None:
        self.lines.append(f"save {trainer.progress.batch_index}")

    def on_end(self, trainer: Any) -> None:
        path = self.folder / f"calls-{trainer.world.rank}.json"
        path.write_text(json.dumps([*self.lines, "end"]))


@dataclass(kw_only=True)
class Recorded(Worse):
    """A training that is written down as it is called back."""

    folder: str = ""

    def callbacks(self) -> Sequence[Callback]:
        return [Recorder(self.folder)]


@dataclass(kw_only=True)
class Steep(contract_tasks.Images):
    """Its gradient is large enough for fp16 to overflow at a large loss scale."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 4 * 4, 3),
        )


class Grouped(contract_tasks.Images):
    """GroupNorm is the first layer: its input needs no gradient."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.GroupNorm(1, 2), nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
        )


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all that a step may change, by name."""
    step = trainer.strategy.step
    found = {name: tensor.clone() for name, tensor in trainer.weights()}
    for number, values in enumerate(step.optimizer.state.values()):
        found |= {f"optimizer {number} {n}": v.clone() for n, v in values.items()}
    if step.average is not None:
        found |= {f"average {n}": t.clone() for n, t in step.average.state().items()}
    return found


def overflow(argument: dict[str, Any]) -> int:
    """On every rank: some good steps, one that overflows on one rank alone, and what it changed."""
    task = Steep(ema=0.9)
    job = Job(precision="fp16", loss_scale="dynamic:initial=1024,every=3", **argument["job"])
    with Trainer(task, job) as trainer:
        batches = trainer.batches()
        for _ in range(2):
            assert trainer.step(next(batches)).updated
        before, progress = everything(trainer), trainer.progress
        batch = next(batches)
        scale = trainer.strategy.step.loss_scale
        assert scale is not None
        if trainer.world.rank == trainer.world.size - 1:  # too large for 16 bits, on one rank alone
            scale.value = 2.0**40
        result = trainer.step(batch)
        assert result.overflow and not result.updated and not result.bad
        assert scale.value in (512.0, 2.0**39) and scale.good_steps == 0
        after = everything(trainer)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        assert trainer.progress.updates == progress.updates
        assert trainer.progress.batch_index == progress.batch_index + 1
        assert trainer.progress.samples_seen == progress.samples_seen + 24
        scale.value = 1024.0
        assert trainer.step(next(batches)).updated
    return 0
