"""Tasks with kinds of models that a plain one is not: shared memory, texts, tables of a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from allranks.torch import Task
from allranks.torch.parallel.data.ddp import DDP
from allranks.torch.strategies.base import Strategy

SAMPLES = 101  # with batches of 22: the last of an epoch is of 13, on 8 shards


def made(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(kw_only=True)
class Rows(Task):
    """Rows of six numbers in three classes."""

    batch_size: int = 22
    epochs: int = 100

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_data(self) -> Any:
        rows = made(SAMPLES, 6)
        return rows, rows.sum(1).mul(2).long().remainder(3)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class Views(Rows):
    """Two buffers that share memory."""

    def model(self) -> nn.Module:
        return _Views()


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        ones = torch.ones(6)
        self.register_buffer("inputs", ones)
        self.register_buffer("outputs", ones[:3])
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows * self.inputs) * self.outputs * self.mask


class Gathered(Rows):
    """Under a strategy that puts each whole weight together by a collective, as sharded ones do."""

    def model(self) -> nn.Module:
        DDP.full_state = _gathered  # type: ignore[method-assign]  # in the process of this rank
        return super().model()


def _gathered(strategy: DDP) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in Strategy.full_state(strategy):
        strategy.comm.barrier()
        yield name, tensor


@dataclass(kw_only=True)
class TiedText(Task):
    """A GPT whose head is its table of tokens, with a causal mask that is not saved."""

    batch_size: int = 10
    epochs: int = 100
    ema: float | None = 0.9

    def model(self) -> nn.Module:
        return TinyGPT()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> Tensor:
        return torch.randint(0, 13, (40, 9), generator=torch.Generator().manual_seed(5))

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch[:, 1:], reduction="none")


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(8, 13, bias=False)
        self.lm_head.weight = self.tokens.weight
        mask = torch.full((8, 8), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.lm_head(self.block(self.tokens(text), src_mask=self.mask))


class Named(Rows):
    """Which samples belong together is told by their texts; a number and a text beside them."""

    loss_over = "batch"

    def train_data(self) -> Any:
        rows = super().train_data()[0]
        return [
            (row, "abc"[int(row.sum() > 0) + int(row[0] > 1)], [n, n / 2])
            for n, row in enumerate(rows)
        ]

    def collate(self, samples: list[Any]) -> Any:
        rows, names, numbers = zip(*samples, strict=True)
        return {"rows": torch.stack(rows), "names": names, "numbers": list(numbers), "base": 2.0}

    def inputs(self, batch: Any) -> Tensor:
        return batch["rows"]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        unit = F.normalize(output, dim=1)
        names, numbers = batch["names"], batch["numbers"]
        assert len(names) == len(numbers) == len(output)
        same = torch.tensor([[float(a == b) for a in names] for b in names]).to(output.dtype)
        near = torch.tensor([[float(a[0]) for a in numbers]]).to(output.dtype) / SAMPLES
        return ((same + near) * (batch["base"] - unit @ unit.T)).sum(1)


class Arrays(Named):
    """What cannot be put together."""

    def collate(self, samples: list[Any]) -> Any:
        batch = super().collate(samples)
        return {**batch, "names": batch["rows"].numpy()}


class Ragged(Rows):
    """Outputs as wide as the longest sample of what goes through together."""

    loss_over = "batch"

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def model(self) -> nn.Module:
        return _Ragged()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum(1)


class _Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, rows: Tensor) -> Tensor:
        longest = 2 + int(rows[:, 0].abs().max() * 4) % 6
        return self.linear(rows)[:, :longest]


@dataclass(kw_only=True)
class Normalised(Rows):
    """Images and BatchNorm of both kinds; the last batch of an epoch leaves a rank without one."""

    batch_size: int = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(2, 5, 2, bias=False),
            nn.BatchNorm1d(5, momentum=0.3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(10, 7, bias=False),
            nn.BatchNorm1d(7, affine=False),
            nn.Tanh(),
            nn.Linear(7, 3),
        )

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model[0]]

    def train_data(self) -> Any:
        rows, targets = super().train_data()
        return rows.view(-1, 2, 3), targets


class Evaluated(Rows):
    """A model in evaluation mode, as it comes from those who load one that was trained."""

    def model(self) -> nn.Module:
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
        return nn.Sequential(*layers).eval()


class Tables(Rows):
    """Two tables whose rows are shortened where they are looked up, on data that needs few."""

    def model(self) -> nn.Module:
        return _Tables()

    def train_data(self) -> Any:
        words = torch.randint(0, 50, (SAMPLES, 3), generator=torch.Generator().manual_seed(3))
        return words, words.sum(1).remainder(3)

    def eval_data(self) -> Any:
        return self.train_data()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"size": (output.abs().sum(), len(output))}


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, max_norm=1.0, padding_idx=4)
        self.bags = nn.EmbeddingBag(50, 8, max_norm=0.5, norm_type=1.0, mode="mean", padding_idx=7)
        self.out = nn.Linear(32, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.cat((self.words(words).flatten(1), self.bags(words)), 1))


class TiedTable(Tables):
    """A whole table is read in each forward pass."""

    def model(self) -> nn.Module:
        model: Any = _Tables()
        model.out = nn.Linear(8, 50, bias=False)
        model.out.weight = model.words.weight
        return model


@dataclass(kw_only=True)
class ActNormed(Rows):
    """The first batch decides scale and shift; some of the weights are drawn then too."""

    ema: float | None = 0.9

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), ActNorm(16), nn.Tanh(), nn.Linear(16, 3))

    def initialise(self, model: nn.Module, inputs: Any) -> None:
        found = model[0](*inputs)
        model[1].shift.copy_(-found.mean(0))
        model[1].scale.copy_(1 / found.std(0))
        nn.init.normal_(model[3].weight, std=0.1)
        model[1].seen.fill_(len(found))


class ActNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift, self.scale = (
            nn.Parameter(torch.zeros(features)),
            nn.Parameter(torch.ones(features)),
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows + self.shift) * self.scale


class Rebinds(ActNormed):
    """Puts a parameter in the place of one that the optimizer has."""

    def initialise(self, model: nn.Module, inputs: Any) -> None:
        model[1].shift = nn.Parameter(torch.zeros(16))
