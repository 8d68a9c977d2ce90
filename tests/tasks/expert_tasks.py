"""Tasks with mixtures of experts: everything at once, experts without tokens, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from allranks.torch import MixtureOfExperts, Task
from allranks.torch.optimizers.layerwise import LAMB
from contract_tasks import SAMPLES, Mixture, UnevenStream, made

WIDTH, HIDDEN, EXPERTS = 6, 8, 12


@dataclass(kw_only=True)
class Averaged(Mixture):
    """With a moving average, and a regularizer of experts and router."""

    ema: float | None = 0.9
    experts: int = 12

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.first, model.dropout, model.second]

    def regularizer(self, model: nn.Module) -> Tensor:
        return 1e-2 * (model.first.up.square().sum() + model.second.router.weight.square().sum())


class OverBatch(Mixture):
    """A loss over the whole batch: all forward passes come before any backward pass."""

    loss_over = "batch"

    def loss(self, output: Any, batch: Any) -> Tensor:
        found, balance, z = output
        losses = (found - batch[2]).square()
        return losses + (0.05 * balance.mean() + 0.01 * z.max())[None, None].expand_as(losses)


@dataclass(kw_only=True)
class Alike(Task):
    """A router of zeros that stays: every token is tied, and goes to the experts 0 and 1."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.2
    only_experts: bool = False
    twice: bool = False

    def model(self) -> nn.Module:
        return _Alike(self)

    def optimizer(self, model: nn.Module) -> Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return AdamW(trained, lr=1e-2, weight_decay=0.1)

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = made(SAMPLES, WIDTH)
        return inputs, inputs.sin().cumsum(1)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(1)


class _Alike(nn.Module):
    def __init__(self, task: Alike) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).requires_grad_(not task.only_experts)
        self.mixture = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS)
        nn.init.zeros_(self.mixture.router.weight).requires_grad_(False)
        if task.twice:
            self.again = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, top_k=1)

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(input))
        return hidden + self.mixture(hidden).output


@dataclass(kw_only=True)
class Streamed(Alike):
    """Shards of a stream that end at different times; no router is ever equal to zero."""

    epochs: int = 3

    def model(self) -> nn.Module:
        model = _Alike(self)
        nn.init.normal_(model.mixture.router.weight)
        return nn.Sequential(nn.Linear(4, WIDTH), model, nn.Linear(WIDTH, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def train_data(self) -> Any:
        return UnevenStream()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


@dataclass(kw_only=True)
class OtherOrder(Alike):
    """Ranks that call the two mixtures in different orders."""

    twice: bool = True

    def model(self) -> nn.Module:
        model = _Alike(self)
        model.__class__ = _OtherOrder
        return model


class _OtherOrder(_Alike):
    def forward(self, input: Tensor) -> Tensor:
        layers = [self.mixture, self.again]
        if dist.is_initialized() and dist.get_rank():
            layers.reverse()
        for layer in layers:
            input = input + layer(input).output
        return input


class Skipped(Alike):
    """The last rank goes past the only mixture."""

    def model(self) -> nn.Module:
        model = _Alike(self)
        model.__class__ = _Skipped
        return model


class _Skipped(_Alike):
    def forward(self, input: Tensor) -> Tensor:
        is_skipped = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        return self.before(input) if is_skipped else super().forward(input)


@dataclass(kw_only=True)
class Refused(Alike):
    """What `expert` cannot do, one by one."""

    fault: str = ""

    def model(self) -> nn.Module:
        model = _Alike(self)
        if self.fault == "shared":
            model.other = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS)
            model.borrowed = nn.Module()
            model.borrowed.weight = model.mixture.down
        elif self.fault == "hook":
            model.mixture.up.register_hook(lambda gradient: gradient)
        elif self.fault == "no mixture":
            return nn.Linear(WIDTH, WIDTH)
        elif self.fault == "unfrozen":
            model.before.requires_grad_(False)
            model.register_forward_pre_hook(lambda model, _: _unfreeze(model.before))
        elif self.fault == "max_norm":
            model.table = nn.Embedding(3, WIDTH, max_norm=1.0)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.fault == "whole tensors":
            return LAMB([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if self.fault == "unfrozen":
            return AdamW(model.parameters(), lr=1e-2)
        return super().optimizer(model)


def _unfreeze(layer: nn.Module) -> None:
    layer.requires_grad_()


class Initialised(Alike):
    def initialise(self, model: nn.Module, inputs: Any) -> None:
        model.before.bias.zero_()
