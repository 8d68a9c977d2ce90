"""Trainings that change on the way or compute with unusual numbers, each beside its plain loop.

`plain` is the loop that anybody would write for the task: one process, the mean over the batch,
`zero_grad`, `step`. The task and the loop share the model, the optimizer and what is done between
the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from allranks.launcher.world import World
from allranks.torch import Task
from allranks.training.callback import Callback
from allranks.training.order import Order

SAMPLES, BATCH, STEPS = 53, 22, 12  # batches of 22, 22 and 9: shards of 3, 2 and 1
CHANGE = 4  # after this step the tasks that change do so


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(kw_only=True)
class Base(Task):
    """Two layers; `between` is done after each step, here and in the plain loop."""

    batch_size: int = BATCH
    epochs: int = 100

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> tuple[Tensor, Tensor]:
        x = drawn(SAMPLES, 5, seed=1)
        return x, x.sum(1).mul(2).long().remainder(3)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def between(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """What happens after step number `step`."""

    def callbacks(self) -> Sequence[Callback]:
        return [_Between(self)]


class _Between(Callback):
    def __init__(self, task: Base) -> None:
        self.task = task

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        strategy = trainer.strategy
        self.task.between(batch.index, strategy.model, strategy.step.optimizer)


@dataclass(kw_only=True)
class ComplexWeight(Base):
    """A complex weight in the Fourier domain, clipped, with a moving average."""

    clip_norm: float | None = 0.3

    def model(self) -> nn.Module:
        return _Fourier()


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=5))


class Rotary(Base):
    """Positions as complex numbers of length 1, in a buffer."""

    def model(self) -> nn.Module:
        return _Rotary()


class _Rotary(nn.Module):
    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.inner(x).view(-1, 4, 2))
        return self.out(torch.view_as_real(pairs * self.turns).flatten(1))


class Waves(Base):
    """Complex samples."""

    def model(self) -> nn.Module:
        return _Waves()

    def train_data(self) -> tuple[Tensor, Tensor]:
        x, y = super().train_data()
        return torch.complex(x, x.flip(1)), y


class _Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4, dtype=torch.complex64)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x).abs())


class Unfrozen(Base):
    """The first layer is unfrozen between two steps, later the last one is frozen."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)  # type: ignore[operator, index]
        return model

    def between(self, step: int, model: Any, optimizer: Optimizer) -> None:
        if step == CHANGE:
            model[0].requires_grad_(True)
        if step == 2 * CHANGE:
            model[2].requires_grad_(False)


class UnfrozenInForward(Base):
    """The first layer unfreezes itself once a buffer says so, in a batch of one sample."""

    def train_data(self) -> tuple[Tensor, Tensor]:
        x, y = super().train_data()
        return x[: 2 * BATCH + 1], y[: 2 * BATCH + 1]

    def model(self) -> nn.Module:
        return _Thawing(super().model())

    def between(self, step: int, model: Any, optimizer: Optimizer) -> None:
        model.step.fill_(step + 1)


class _Thawing(nn.Module):
    step: Tensor

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.body[0].requires_grad_(False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and int(self.step) > CHANGE:
            self.body[0].requires_grad_(True)
        return self.body(x)  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class GroupAdded(Base):
    """A group joins the optimizer on the way; a schedule and clipping go over all groups."""

    clip_norm: float | None = 0.5

    def optimizer(self, model: Any) -> Optimizer:
        return SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def between(self, step: int, model: Any, optimizer: Optimizer) -> None:
        if step == CHANGE:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.03})

    def schedule(self, step: int) -> float:
        return 1 / (1 + step)


class Groups(Base):
    """Groups with rates of their own, a schedule, a regularizer."""

    def optimizer(self, model: Any) -> Optimizer:
        return SGD(
            [
                {"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.1},
                {"params": model[2].parameters()},
            ],
            lr=0.1,
            nesterov=True,
            momentum=0.8,
        )

    def schedule(self, step: int) -> float:
        return min(1.0, (step + 1) / 5)

    def regularizer(self, model: Any) -> Tensor:
        return 1e-2 * model[0].weight.abs().sum()  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class SparseSGD(Base):
    """A sparse table under SGD with momentum, clipped."""

    clip_norm: float | None = 0.2

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(40, 6, sparse=True), nn.Linear(6, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randint(0, 30, (SAMPLES, 3), generator=generator)
        return x, x.sum(1).remainder(3)


@dataclass(kw_only=True)
class SparseAdagrad(SparseSGD):
    """A sparse table under Adagrad."""

    clip_norm: float | None = None

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adagrad(model.parameters(), lr=0.1)


@dataclass(kw_only=True)
class SparseRows(SparseSGD):
    """SparseAdam: a row that no sample of the batch touched keeps its moments."""

    clip_norm: float | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 3, sparse=True), _Mean())

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SparseAdam(model.parameters(), lr=0.1)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Adversarial(Base):
    """A backward pass of its own in forward, which it clears (the fast gradient sign)."""

    def model(self) -> nn.Module:
        return _Adversarial(super().model())

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=1e-2)


class _Adversarial(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x.detach().requires_grad_(True)
            self.body(x).logsumexp(1).sum().backward()
            assert x.grad is not None
            x = (x + 0.05 * x.grad.sign()).detach()
            self.zero_grad()
        return self.body(x)  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class Averaged(Unfrozen):
    """A moving average of the weights that are trained, some of them from the middle on."""

    ema: float | None = 0.8


def plain(task: Any, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights and buffers after `steps` of a loop by hand, and the average as `average/…`."""
    torch.manual_seed(0)
    model = task.model()
    model._apply(
        lambda t: (
            t.to(torch.complex128 if t.is_complex() else t.double().dtype)
            if t.is_complex() or t.is_floating_point()
            else t
        )
    )
    optimizer = task.optimizer(model)
    x, y = task.train_data()
    order = Order(len(x), task.batch_size, 0, task.last_batch)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(steps):
        chosen = torch.as_tensor(order.batch(*divmod(step, order.steps_per_epoch)))
        model.train()
        optimizer.zero_grad()
        loss = task.loss(model(x[chosen]), (x[chosen], y[chosen])).mean()
        if (extra := task.regularizer(model)) is not None:
            loss = loss + extra
        loss.backward()
        if task.clip_norm is not None:
            _clip(optimizer, task.clip_norm)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(step)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - (task.ema or 0.0))
        if isinstance(task, Base):
            task.between(step, model, optimizer)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if task.ema is not None:
        found |= {f"average/{name}": tensor for name, tensor in average.items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def _clip(optimizer: Optimizer, limit: float) -> None:
    """Torch's own cannot take sparse gradients."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in trained:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    nn.utils.clip_grad_norm_(trained, limit)


class ResumedGroup(GroupAdded):
    """The group is added by a program that has no memory of having done so."""

    has_added: ClassVar[bool] = False

    def between(self, step: int, model: Any, optimizer: Optimizer) -> None:
        if step >= CHANGE and not self.has_added:
            vars(self)["has_added"] = True
            super().between(CHANGE, model, optimizer)


class ByRank(Base):
    """Rank 1 alone unfreezes the first layer."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)  # type: ignore[operator, index]
        return model

    def between(self, step: int, model: Any, optimizer: Optimizer) -> None:
        if step == CHANGE and World.from_environment().rank == 1:
            model[0].requires_grad_(True)


class KeepsItsGradient(Base):
    """Its own backward pass in the loss leaves a gradient."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = super().loss(output, batch)
        losses.mean().backward(retain_graph=True)
        return losses


class UpdatesInBackward(Base):
    """An optimizer in a hook takes the gradient away."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].weight.register_post_accumulate_grad_hook(_take)  # type: ignore[union-attr, index]
        return model


def _take(parameter: Tensor) -> None:
    parameter.grad = None


class Scheduled(Base):
    """A scheduler of torch made with the optimizer."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().optimizer(model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        return optimizer


class ScheduledOnTheWay(Base):
    """A scheduler of torch made in a callback."""

    def between(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 0:
            self.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)


class Router(Base):
    """A balance loss that the forward pass leaves on the model."""

    def model(self) -> nn.Module:
        return _Router()

    def regularizer(self, model: Any) -> Tensor:
        return 0.1 * model.balance  # type: ignore[no-any-return]


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.gate(x).softmax(1).mean(0).square().sum()
        return self.out(x)  # type: ignore[no-any-return]


class DetachedRouter(Router):
    """The same as a number, on which no gradient depends."""

    def regularizer(self, model: Any) -> Tensor:
        return model.balance.detach() * model.out.weight.square().mean()  # type: ignore[no-any-return]


class RowsOfADenseTable(SparseRows):
    """SparseAdam with a table that is not sparse."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 3), _Mean())


class Preconditioned(Base):
    """An optimizer that multiplies gradients as matrices, after layers of odd sizes."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 3)
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return _Preconditioned(model.parameters())


class _Preconditioned(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            g = p.grad
            p.sub_((g @ g.t()) @ g / g.norm() ** 2 if p.ndim == 2 else g, alpha=0.1)


@dataclass
class CacheSettings:
    """As the configs of transformers."""

    use_cache: bool = True


class _Cached(nn.Module):
    """Blocks that put keys into a cache which they share, as those of transformers do."""

    def __init__(self, settings: CacheSettings | None) -> None:
        super().__init__()
        self.config = settings
        self.blocks = nn.ModuleList([_Attending() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        caches = self.config is None or self.config.use_cache
        for block in self.blocks:
            x = block(x, [] if caches else None)
        return x


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Tensor] | None) -> Tensor:
        keys = self.linear(x)
        if kept is not None:
            kept.append(keys)
            keys = torch.cat(kept, 1)  # in a second pass twice as many
        return x * keys  # which fails where the shapes differ


@dataclass(kw_only=True)
class Cached(Task):
    batch_size: int = 16
    epochs: int = 2
    can_say_so: bool = True

    def model(self) -> nn.Module:
        return _Cached(CacheSettings() if self.can_say_so else None)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Tensor:
        return torch.randn(32, 4, generator=torch.Generator().manual_seed(1))

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return (output - batch).square().mean(1)
