"""Tasks whose data draws, differs from rank to rank,
or is cut in a way that is not the engine's."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

import contract_tasks
from allranks.torch import Task
from allranks.training.callback import Callback
from contract_tasks import SAMPLES, made


class Rows:
    """`SAMPLES` rows by number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.rows = made(samples, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number]


@dataclass(kw_only=True)
class Plain(contract_tasks.Plain):
    """A linear model on rows by number; the target is the sum of a row."""

    epochs: int = 4

    def train_data(self) -> Any:
        return Rows()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch.sum(1)).square()

    def inputs(self, batch: Any) -> Any:
        return (batch,)


class Masked(Plain):
    """Masks drawn in collate, by all three generators: masked language models, mixup, CutMix."""

    def collate(self, samples: list[Tensor]) -> Tensor:
        rows = torch.stack(samples)
        rows = rows.masked_fill(torch.rand(rows.shape) < 0.2, 0.0)
        noise = torch.from_numpy(np.random.standard_normal(rows.shape))
        return rows + 0.1 * noise + 0.01 * random.random()


class Evaluated(Masked):
    """Masks in an evaluation, too, for which `loss` is another one."""

    def eval_data(self) -> Any:
        return Rows()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) if self.training else torch.ones(len(batch))


class EvaluatedUnmasked(Evaluated):
    def eval_collate(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples)


class Stream:
    """A row for each number of a shard, without end of files or of anything that could be drawn."""

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Any:
        return iter(made(12, 4, seed=shard)[skip:])


class MaskedStream(Masked):
    """The same masks over a stream."""

    def train_data(self) -> Any:
        return Stream()


class Noisy(nn.Module):
    """Draws from NumPy and Python in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal(rows.shape)).to(rows.dtype)
        out: Tensor = self.layer(rows + noise) * (1 + 0.1 * random.random())
        return out


class NoisyForward(Plain):
    def model(self) -> nn.Module:
        return Noisy()


class Langevin(SGD):
    """Adds noise of NumPy to the weights in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            noise = torch.from_numpy(np.random.standard_normal(tuple(parameter.shape)))
            parameter.add_(noise.to(parameter.dtype), alpha=0.01)


class Disturb(Callback):
    """Draws from Python's generator after each step, and moves the weights by it."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        for parameter in trainer.strategy.model.parameters():
            parameter.data.add_(0.01 * random.random())


class NoisyUpdates(Plain):
    """Noise in the optimizer, the regularizer and a callback, over data that is read by number."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Langevin(model.parameters(), lr=0.01)

    def regularizer(self, model: nn.Module) -> Tensor:
        return sum(p.square().sum() for p in model.parameters()) * float(np.random.random())

    def callbacks(self) -> list[Any]:
        return [Disturb()]


class OwnGenerator(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number] + 0.1 * torch.from_numpy(self.random.standard_normal(4))


class Drawing(Plain):
    def train_data(self) -> Any:
        return OwnGenerator()


class OnceMore(IterableDataset[Tensor]):
    """Noise from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rows, self.random = made(48, 4), np.random.default_rng(0)

    def __iter__(self) -> Any:
        for row in self.rows:
            yield row + 0.1 * torch.from_numpy(self.random.standard_normal(4))


class Whole(Plain):
    def train_data(self) -> Any:
        return DataLoader(OnceMore(), batch_size=24)


@dataclass(kw_only=True)
class Full(Plain):
    """A loader that leaves out the rest of an epoch, with an order of the job's or its own."""

    epochs: int = 1
    sampled: bool = False

    def train_data(self) -> Any:
        sampler = SubsetRandomSampler(range(SAMPLES)) if self.sampled else None
        return DataLoader(Rows(), batch_size=24, sampler=sampler, drop_last=True)


RANK = int(os.environ.get("RANK", "0"))


@dataclass(kw_only=True)
class Differs(Plain):
    """`how` the data of ranks differs."""

    how: str = "shorter"

    def train_data(self) -> Any:
        if self.how == "shorter":
            return Rows(36 - RANK)
        if self.how == "cut":
            return made(72, 4)[RANK :: int(os.environ.get("WORLD_SIZE", "1"))]
        if self.how == "drawn":
            return made(36, 4, seed=RANK)
        if self.how == "kind":
            return made(36, 4) if RANK else Rows(36)
        return Rows(36)

    def eval_data(self) -> Any:
        return Rows(12 - RANK if self.how == "evaluation" else 12)


class Texts:
    """Texts of 3 to 11 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        sizes = torch.randint(3, 12, (SAMPLES,), generator=generator)
        self.texts = [torch.randint(1, 9, (int(n),), generator=generator) for n in sizes]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> Tensor:
        return self.texts[number]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, texts: Tensor) -> Tensor:
        out: Tensor = self.output(self.embedding(texts))
        return out


@dataclass(kw_only=True)
class Padded(Task):
    """Texts padded to their longest; `ignored` stands where there is none,
    with or without weights."""

    batch_size: int = 24
    ignored: int = 0
    weighted: bool = False
    width: int = 0

    def model(self) -> nn.Module:
        return Reader()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.5)

    def train_data(self) -> Any:
        return Texts()

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        width = self.width or max(map(len, samples))
        texts = torch.full((len(samples), width), self.ignored)
        for row, text in zip(texts, samples, strict=True):
            row[: len(text)] = text
        return texts[:, :-1].clamp(min=0), texts[:, 1:]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(
            output.transpose(1, 2), batch[1], ignore_index=self.ignored, reduction="none"
        )

    def weight(self, batch: Any) -> Tensor | None:
        return batch[1] != self.ignored if self.weighted else None


class Shifted(nn.Module):
    """Makes a tensor in its forward pass, in the type that torch takes where none is said."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.zeros(rows.shape))
        return out


class OfTwoTypes(Plain):
    def model(self) -> nn.Module:
        return Shifted()


class Again:
    """Rows that can be iterated anew, with nothing else to them."""

    def __iter__(self) -> Any:
        return iter(made(SAMPLES, 4))


class NoisyAgain(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        for row in made(SAMPLES, 4):
            yield row + 0.1 * torch.randn(4, dtype=torch.float64)


class Plainly(Plain):
    def train_data(self) -> Any:
        return Again()


class Bare(Plain):
    """A data set of torch without a DataLoader around it."""

    def train_data(self) -> Any:
        return NoisyAgain()


class MeanOfMeans(Plain):
    def eval_data(self) -> Any:
        return Rows(10)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"error": ((output.squeeze(1) - batch.sum(1)).abs().mean(), 1)}
