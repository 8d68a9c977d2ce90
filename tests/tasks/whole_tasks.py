"""Trainings with optimizers that look at whole tensors, on models that every strategy can cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer

from allranks.job.job import Job
from allranks.job.place import PARAMETER
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.optimizers.layerwise import LAMB, LARS
from allranks.torch.optimizers.rowwise_adagrad import RowwiseAdagrad
from allranks.training.callback import Callback
from tensor_tasks import Stack


class ByGroup(Optimizer):
    """Momentum; where a group says so, of a matrix made nearly orthogonal, as Muon does.

    Both keep `momentum`, which has the shape of a part in one group and of a whole in the other.
    """

    def __init__(self, groups: Any, lr: float = 0.02) -> None:
        super().__init__(groups, {"lr": lr, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p.grad)
                state["steps"] = state.get("steps", 0) + 1
                momentum = state["momentum"].mul_(0.9).add_(p.grad)
                if group["orthogonal"]:
                    momentum = momentum / momentum.norm()
                    for _ in range(3):  # Newton-Schulz; what is 0 stays 0, unlike in an SVD
                        momentum = 1.5 * momentum - 0.5 * momentum @ momentum.T @ momentum
                p.mul_(1 - 0.1 * group["lr"]).sub_(group["lr"] * momentum)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def by_group(model: nn.Module) -> Optimizer:
    rest = [p for p in model.parameters() if p.ndim != 2]
    return ByGroup([{"params": rest}, {"params": matrices(model), "orthogonal": True}])


def kept_from_the_start(model: nn.Module) -> Optimizer:
    optimizer = LARS(model.parameters(), lr=1.0)
    for p in model.parameters():
        optimizer.state[p]["velocity"] = torch.zeros_like(p)
    return optimizer


class ByDecay(Optimizer):
    """Steps of the length of the weight, where there is a weight decay."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0, "momentum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                change = p.grad + group["weight_decay"] * p
                if group["weight_decay"]:
                    change = change * (p.norm() / change.norm())
                if group["momentum"]:
                    kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                    change = kept.mul_(group["momentum"]).add_(change)
                p -= group["lr"] * change


class SetsDecay(Callback):
    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        for group in trainer.strategy.step.optimizer.param_groups:
            group["weight_decay"] = 0.01 if trainer.progress.batch_index > 2 else 0.0


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lars": lambda model: LARS(model.parameters(), lr=1.0, trust=0.02, weight_decay=1e-2),
    "lamb": lambda model: LAMB(model.parameters(), lr=0.01, weight_decay=0.1),
    "muon": lambda model: Muon(matrices(model), lr=0.01, weight_decay=0.1),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.02, weight_decay=0.1),
    "rowwise": lambda model: RowwiseAdagrad(model.parameters(), lr=0.05, lr_decay=0.1),
    "by group": by_group,
    "kept from the start": kept_from_the_start,
    "by decay": lambda model: ByDecay(model.parameters()),
    "by decay, kept": lambda model: ByDecay([{"params": matrices(model), "momentum": 0.9}]),
}


@dataclass(kw_only=True)
class Whole(Stack):
    """Clipped, with an average and an uneven last batch; 23 columns that no 2 or 3 ranks share
    evenly.
    """

    name: str = "muon"
    hidden: int = 23
    ema: float | None = 0.9

    def optimizer(self, model: nn.Module) -> Optimizer:
        return OPTIMIZERS[self.name](model)

    def callbacks(self) -> list[Callback]:
        return [SetsDecay()] if self.name.startswith("by decay") else []


def state_lies_whole_on_one_rank(argument: dict[str, Any]) -> None:
    """After two steps: each matrix is kept by one rank, every rank keeps some."""
    job = Job(strategy=argument["strategy"])
    with Trainer(Whole(), job, world=World.from_environment()) as trainer:
        batches = trainer.batches()
        for _ in range(2):
            trainer.step(next(batches))
        step, comm = trainer.strategy.step, trainer.strategy.comm
        shapes = {n: tuple(p.shape) for n, p in Whole().model().named_parameters()}
        kept = {
            name: tuple(step.optimizer.state[p]["momentum_buffer"].shape)
            for name, p in step.model.named_parameters()
            if step.optimizer.state.get(p)
        }
        assert kept and all(shapes[name] == shape for name, shape in kept.items())
        names = [set(text.split()) for text in comm.gather_texts(" ".join(kept))]
        assert sum(map(len, names)) == len(set.union(*names)) == 4
        rows = trainer.strategy.placement(updated=True)
        held = {r.name: r.optimizer_bytes for r in rows if r.kind == PARAMETER}
        size = step.parameters[0].element_size()
        for name, shape in shapes.items():
            assert held[name] == (shape[0] * shape[1] * size if name in kept else 0)
