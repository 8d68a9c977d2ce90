"""The task that `fuzz.py` draws: every setting is one that a combination says, or its plainest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from traits import Counting, Samples, optimizer_with, rows_of, with_trait

from allranks.programs.models.gpt import GPTShape, gpt
from allranks.torch import MixtureOfExperts, Task

TOKENS, VOCABULARY, FEATURES = 12, 11, 4
# Adagrad: a bias of keys has no gradient but for what rounds, which its own eps of 1e-10 enlarges.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: NAdam(p, lr=1e-2),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: Adagrad(p, lr=1e-2, eps=1e-6),
}
NORMS = ("none", "batch", "layer", "group")
MODELS = (
    *("layers", "images", "residual", "words", "sentences"),
    *("mixture", "rare", "recurrent", "lookups", "contrast"),
)
TEXTS = ("words", "sentences", "recurrent", "lookups")
ROW_BY_ROW = ("sgd", "adagrad")
"""Optimizers that take the gradients of `lookups`, whose table gives them row by row."""


@dataclass(kw_only=True)
class Drawn(Task):
    """A small model and its data, as the settings say."""

    batch_size: int = 8
    epochs: int = 100
    clip_norm: float | None = None
    kind: str = "layers"
    width: int = 8
    depth: int = 2
    norm: str = "none"
    dropout: float = 0.0
    by: str = "sgd"
    samples: int = 64
    frozen: bool = False
    penalty: float = 0.0
    weighted: bool = False
    warm_up: int = 0
    trait: str = "none"

    def __post_init__(self) -> None:
        self._counting = Counting()
        if self.trait == "object_batch":
            vars(self)["collate"] = rows_of
        if self.kind == "contrast":
            vars(self)["loss_over"] = "batch"

    def model(self) -> nn.Module:
        """One of `MODELS`."""
        made = _MODELS[self.kind](self)
        if self.frozen:
            next(made.parameters()).requires_grad_(False)
        return with_trait(self.trait, made)

    def callbacks(self) -> list[Any]:
        return [self._counting] if self.trait == "callback" else []

    def branches(self, model: nn.Module) -> list[str]:
        """Of the kinds whose parts do not wait for each other."""
        return ["common", "rare", "never"] if self.kind == "rare" else []

    def optimizer(self, model: nn.Module) -> Optimizer:
        return optimizer_with(self.trait, model, OPTIMIZERS[self.by])

    def regularizer(self, model: nn.Module) -> Any:
        if not self.penalty:
            return None
        # None of biases: Adam makes whole steps of one that only what rounds has moved from zero.
        squares = [p.square().sum() for p in model.parameters() if p.requires_grad and p.dim() > 1]
        return self.penalty * torch.stack(squares).sum()

    def schedule(self, step: int) -> float:
        if self.trait == "callback":
            return 1.0 / (1 + self._counting.steps)
        return min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0

    def train_data(self) -> Any:
        """Tuples of tensors; which tokens count is the last, where some do not."""
        random = torch.Generator().manual_seed(5)
        if self.kind in TEXTS:
            text = torch.randint(VOCABULARY, (self.samples, TOKENS + 1), generator=random)
            length = torch.randint(1, TOKENS + 1, (self.samples,), generator=random)
            return text, torch.arange(TOKENS) < length[:, None]
        shape = (2, 6, 6) if self.kind in ("images", "residual") else (FEATURES,)
        inputs = torch.randn(self.samples, *shape, generator=random, dtype=torch.float64)
        if self.kind == "rare":
            inputs[:, 0] = (torch.arange(self.samples) == 5).double() * 4 - 2
        wanted = inputs.flatten(1).sum(1).sin()
        return Samples(inputs, wanted) if self.trait == "object_batch" else (inputs, wanted)

    def inputs(self, batch: Any) -> Any:
        return (batch[0][:, :-1],) if self.kind in TEXTS else (batch[0],)

    def weight(self, batch: Any) -> Any:
        """Of some tokens none; of samples anything above zero."""
        if self.weighted and self.kind not in (*TEXTS, "contrast"):
            return (batch[0].flatten(1)[:, 1] - 0.5).clamp(min=0.01)
        return batch[1] if self.kind == "words" else None

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.trait == "object_output":
            output = output.values
        if self.kind in ("words", "sentences"):
            return F.cross_entropy(output.transpose(1, 2), batch[0][:, 1:], reduction="none")
        if self.kind in TEXTS:
            return F.cross_entropy(output, batch[0][:, -1], reduction="none")
        if self.kind == "contrast":
            near, itself = output @ output.T / self.width, torch.arange(len(output))
            return F.cross_entropy(near, itself, reduction="none")
        if self.kind == "mixture":
            found, balance = output
            return (found - batch[1]).square() + 0.05 * balance
        return (output.squeeze(1) - batch[1]).square()


def _norm_of(task: Drawn, pictures: bool = False) -> list[nn.Module]:
    makes: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: (nn.BatchNorm2d if pictures else nn.BatchNorm1d)(task.width),
        "layer": lambda: nn.GroupNorm(1, task.width) if pictures else nn.LayerNorm(task.width),
        "group": lambda: nn.GroupNorm(2, task.width),
    }
    return [makes[task.norm]()] if task.norm != "none" else []


def _layers(task: Drawn) -> nn.Module:
    """No bias before a norm: its true gradient is zero, and Adam makes steps of what rounds."""
    made: list[nn.Module] = []
    for depth in range(task.depth):
        made += [nn.Linear(task.width if depth else FEATURES, task.width, bias=task.norm == "none")]
        made += [*_norm_of(task), nn.Tanh(), *([nn.Dropout(task.dropout)] if task.dropout else [])]
    return nn.Sequential(*made, nn.Linear(task.width, 1))


def _images(task: Drawn) -> nn.Module:
    made: list[nn.Module] = []
    for depth in range(task.depth):
        made += [nn.Conv2d(task.width if depth else 2, task.width, 3, padding=1, bias=False)]
        made += [*_norm_of(task, pictures=True), nn.Tanh()]
        made += [nn.Dropout2d(task.dropout)] if task.dropout else []
    return nn.Sequential(*made, nn.Flatten(), nn.Linear(36 * task.width, 1))


def _tied(task: Drawn) -> nn.Module:
    """The rows of the table are the weights of the last layer too."""
    table, out = nn.Embedding(VOCABULARY, task.width), nn.Linear(task.width, VOCABULARY, bias=False)
    out.weight = table.weight
    made: list[nn.Module] = [table]
    for _ in range(task.depth):
        made += [nn.Linear(task.width, task.width), nn.Tanh()]
    return nn.Sequential(*made, out)


class _Residual(nn.Module):
    def __init__(self, task: Drawn) -> None:
        super().__init__()
        self.conv = nn.Conv2d(task.width, task.width, 3, padding=1, bias=False)
        self.norm = nn.Sequential(*_norm_of(task, pictures=True))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.norm(self.conv(inputs)))


def _residual(task: Drawn) -> nn.Module:
    first, pool = nn.Conv2d(2, task.width, 3, stride=2, padding=1), nn.AdaptiveAvgPool2d(1)
    blocks = [_Residual(task) for _ in range(task.depth)]
    return nn.Sequential(first, *blocks, pool, nn.Flatten(), nn.Linear(task.width, 1))


class _Recurrent(nn.Module):
    """Its state goes from word to word."""

    def __init__(self, task: Drawn) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, task.width)
        self.state = nn.LSTM(task.width, task.width, batch_first=True)
        self.out = nn.Linear(task.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        output: Tensor = self.out(self.state(self.table(text))[0][:, -1])
        return output


class _Lookups(nn.Module):
    """A table whose gradient has the rows alone that were looked up."""

    def __init__(self, task: Drawn) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(VOCABULARY, task.width, sparse=True)
        self.out = nn.Linear(task.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        output: Tensor = self.out(torch.tanh(self.table(text)))
        return output


def _contrast(task: Drawn) -> nn.Module:
    hidden = nn.Linear(FEATURES, task.width)
    return nn.Sequential(hidden, nn.Tanh(), nn.Linear(task.width, task.width))


class _Mixture(nn.Module):
    def __init__(self, task: Drawn) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, task.width)
        self.experts = MixtureOfExperts(task.width, task.width, 12, capacity_factor=1.0)
        self.out = nn.Linear(task.width, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.embed(inputs))
        mixed = self.experts(hidden)
        return self.out(hidden + mixed.output).squeeze(1), mixed.balance


class _Rare(nn.Module):
    """Parameters that one sample uses, and others that none does."""

    def __init__(self, task: Drawn) -> None:
        super().__init__()
        self.common, self.rare, self.never = (nn.Linear(FEATURES, 1) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.common(inputs)
        chosen = inputs[:, 0] > 0
        if chosen.any():
            output = output + torch.where(chosen[:, None], self.rare(inputs), 0.0)
        return output


def _sentences(task: Drawn) -> nn.Module:
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "heads": 4, "width": 16}
    return gpt(GPTShape(**shape, layers=task.depth, dropout=task.dropout))


_MODELS: dict[str, Callable[[Drawn], nn.Module]] = {
    "layers": _layers,
    "images": _images,
    "residual": _residual,
    "words": _tied,
    "sentences": _sentences,
    "mixture": _Mixture,
    "rare": _Rare,
    "recurrent": _Recurrent,
    "lookups": _Lookups,
    "contrast": _contrast,
}
