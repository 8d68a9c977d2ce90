"""Tasks that `check` has to be right about: correct ones that look wrong,
and wrong ones that hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from allranks.torch import Task
from allranks.training.callback import Callback

SAMPLES = 61  # with batches of 22: 22 22 17


def made(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(kw_only=True)
class Points(Task):
    """A classifier of points: what the other tasks change."""

    batch_size: int = 22
    epochs: int = 100

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_data(self) -> Any:
        points = made(SAMPLES, 6)
        return points, points.sum(1).mul(3).long().remainder(3)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


# --- correct on any number of ranks ---------------------------------------------------------------


@dataclass(kw_only=True)
class EndlessMetric(Points):
    """Metrics that are infinite or no number."""

    def eval_data(self) -> Any:
        points = made(37, 6, seed=6)
        return points, points.sum(1).mul(3).long().remainder(3)

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "perplexity": float("inf"), "auc": float("nan")}


class Clamped(Points):
    """A callback that changes weights after every step, and noise before the first."""

    def callbacks(self) -> Any:
        return [_Clamp()]


class _Clamp(Callback):
    @torch.no_grad()
    def on_start(self, trainer: Any) -> None:
        for number, parameter in enumerate(trainer.strategy.model.parameters()):
            parameter.add_(0.1 * made(*parameter.shape, seed=number))

    @torch.no_grad()
    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        for parameter in trainer.strategy.model.parameters():
            parameter.clamp_(-0.2, 0.2)


class PackedBias(Points):
    """Attention, whose bias of the keys has a true gradient of zero, under Adagrad."""

    def model(self) -> nn.Module:
        return _Attention()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adagrad(model.parameters(), lr=0.05)

    def train_data(self) -> Any:
        points = made(SAMPLES, 5, 8)
        return points, points.sum((1, 2)).long().remainder(3)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, points: Tensor) -> Tensor:
        return self.out(self.layer(points).mean(1))


@dataclass(kw_only=True)
class BiasBeforeNorm(Points):
    """A bias whose true gradient is zero, an evaluation that sees it, and an average of it."""

    ema: float | None = 0.9

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def eval_data(self) -> Any:
        return self.train_data()


class Spectral(Points):
    """A layer that keeps the direction of its largest factor,
    and moves it in every forward pass."""

    def model(self) -> nn.Module:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16))
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 3))


@dataclass(kw_only=True)
class ZeroSum(Points):
    """Advantages that add up to nothing, in one batch of all samples."""

    batch_size: int = 88
    tiny: float = 1.0

    def train_data(self) -> Any:
        points, worth = made(88, 6), made(88, seed=9).double()
        return points, points.sum(1).long().remainder(3), worth - worth.mean()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        chosen = output.log_softmax(1).gather(1, batch[1][:, None])[:, 0]
        return -(chosen - chosen.detach()).exp() * batch[2] * self.tiny


@dataclass(kw_only=True)
class Nearly(ZeroSum):
    """The same, so small that a square of it is nothing."""

    tiny: float = 1e-35


class Sparse(Points):
    """Sparse gradients."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(0, 50, (SAMPLES, 3), generator=generator)
        return words, words.sum(1).remainder(3)


class Masked(Points):
    """Buffers that hide others: infinities, huge numbers, a count; and BatchNorm beside them."""

    def model(self) -> nn.Module:
        return _Masked()


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("least", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.norm(self.first(points)).relu())


# --- other than in one process --------------------------------------------------------------------


class Centred(Points):
    """Samples that depend on each other: each is seen beside the mean of its micro-batch."""

    def model(self) -> nn.Module:
        return _Centred()


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, points: Tensor) -> Tensor:
        return self.layer(points - points.mean(0))


class Drawn(Points):
    """A function that is not keyed: the numbers follow the micro-batch."""

    def model(self) -> nn.Module:
        return _Drawn()


class _Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, points: Tensor) -> Tensor:
        output: Tensor = self.layer(points)
        return output * torch.poisson(torch.ones_like(output))


class OnlyOnMany(Points):
    """A parameter that one process does not have."""

    def model(self) -> nn.Module:
        model = super().model()
        if torch.distributed.is_initialized():
            model.append(nn.Linear(3, 3))
        return model


class Walks(Points):
    """Each rank changes its weights by itself."""

    def callbacks(self) -> Any:
        return [_Walk()]


class _Walk(Callback):
    @torch.no_grad()
    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if trainer.world.rank:
            trainer.strategy.model[0].bias.add_(1e-3)


class Codebook(Points):
    """A buffer of its own that follows the samples of a rank."""

    def model(self) -> nn.Module:
        return _Codebook()


class _Codebook(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, points: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(points.mean(0), 0.1)
        return self.layer(points)
