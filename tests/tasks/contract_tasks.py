"""Small tasks that together use everything a strategy can get wrong. Each names what it is for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel

from allranks.programs.models.gpt import GPTShape, gpt
from allranks.torch import MixtureOfExperts, Task
from allranks.training.callback import Callback

# No bias before a BatchNorm: its true gradient is zero, and AdamW makes steps of what rounding
# leaves of it. Two right programs then differ by 1e-9, free-running.
SAMPLES = 101  # with batches of 24: 24 24 24 24 5, the last on 5 of 8 shards


def made(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(kw_only=True)
class Images(Task):
    """BatchNorm, dropout, clipping, an uneven last batch, AdamW."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.3
    dropout: float = 0.2

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout2d(self.dropout),
            nn.Flatten(),
            nn.Linear(6 * 4 * 4, 12, bias=False),
            nn.BatchNorm1d(12, momentum=None),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(12, 3),
        )

    def branches(self, model: nn.Module) -> list[str]:
        return ["0", "1", "3", "5", "6"]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> tuple[Tensor, Tensor]:
        images = made(SAMPLES, 2, 6, 6)
        return images, images.mean(dim=(1, 2, 3)).mul(20).long().remainder(3)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return tuple(tensor[:10] for tensor in self.train_data())  # type: ignore[return-value]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = output.argmax(1) == batch[1]
        return {"accuracy": (right.sum(), len(right))}


@dataclass(kw_only=True)
class Blocks(Images):
    """Blocks, which are compiled by themselves, with BatchNorm and dropout in them and around."""

    def model(self) -> nn.Module:
        def block(channels: int) -> nn.Module:
            first = nn.Conv2d(channels, 6, 3, padding=1, bias=False)
            return nn.Sequential(first, nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(self.dropout))

        head = nn.Flatten(), nn.Linear(6 * 36, 3)
        return nn.Sequential(block(2), block(6), block(6), nn.BatchNorm2d(6), *head)


@dataclass(kw_only=True)
class Words(Task):
    """Token weights that differ from sample to sample, tied and frozen weights, a regularizer."""

    batch_size: int = 24
    epochs: int = 100
    tokens: int = 5
    vocabulary: int = 11

    def model(self) -> nn.Module:
        return _Tied(self.vocabulary)

    def branches(self, model: nn.Module) -> list[str]:
        return ["mix", "frozen", "out"]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train_data(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        text = torch.randint(self.vocabulary, (SAMPLES, self.tokens + 1), generator=generator)
        length = torch.randint(1, self.tokens + 1, (SAMPLES,), generator=generator)
        return {"text": text, "length": length}

    def inputs(self, batch: Any) -> Any:
        return {"text": batch["text"][:, :-1]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch["text"][:, 1:], reduction="none")

    def weight(self, batch: Any) -> Tensor:
        return torch.arange(self.tokens) < batch["length"][:, None]

    def regularizer(self, model: nn.Module) -> Tensor:
        return 1e-2 * model.embedding.weight.square().sum()

    def schedule(self, step: int) -> float:
        return min(1.0, (step + 1) / 10)


class _Tied(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.mix = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.out = nn.Linear(8, vocabulary, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.frozen(torch.relu(self.mix(self.embedding(text)))))


@dataclass(kw_only=True)
class Pairs(Task):
    """A loss that couples all samples of the global batch (contrastive), with an output tuple."""

    batch_size: int = 24
    epochs: int = 100
    loss_over = "batch"

    def model(self) -> nn.Module:
        return _Towers()

    def branches(self, model: nn.Module) -> list[str]:
        return ["left", "right"]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> tuple[Tensor, Tensor]:
        left = made(SAMPLES, 6)
        return left, left @ made(6, 5, seed=8) + 0.1 * made(SAMPLES, 5, seed=9)

    def inputs(self, batch: Any) -> Any:
        return tuple(batch)

    def loss(self, output: Any, batch: Any) -> Tensor:
        left, right = output
        return F.cross_entropy(left @ right.T, torch.arange(len(left)), reduction="none")


@dataclass(kw_only=True)
class Sentences(Task):
    """A causal transformer: tied embeddings, dropout in blocks, clipping, weight decay."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.3
    vocabulary: int = 11
    tokens: int = 12
    heads: int = 4

    def model(self) -> nn.Module:
        shape = {"vocabulary": self.vocabulary, "context": self.tokens, "heads": self.heads}
        return gpt(GPTShape(**shape, width=16, layers=2, dropout=0.1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def train_data(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randint(self.vocabulary, (SAMPLES, self.tokens + 1), generator=generator)

    def eval_data(self) -> Tensor:
        return self.train_data()[:10]

    def inputs(self, batch: Any) -> Any:
        return (batch[:, :-1],)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch[:, 1:], reduction="none")


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.right = nn.Linear(5, 8, bias=False)  # nor a bias that the softmax cancels

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(left), self.right(right)


@dataclass(kw_only=True)
class Plain(Task):
    """Nothing special at all, so that a plain loop of ten lines can say the same."""

    batch_size: int = 24
    epochs: int = 100

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = made(SAMPLES, 4)
        return inputs, inputs.sum(1).sin()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


@dataclass(kw_only=True)
class Orthogonal(Plain):
    """Matrices alone, by Muon: an update is of the whole matrix, and not linear in its gradient."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Muon(model.parameters(), lr=0.02)


class Wide(Plain):
    """One weight is large enough that its gradient is moved into a bucket, and not added there."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 160), nn.Tanh(), nn.Linear(160, 160), nn.Linear(160, 1))


class Penalised(Plain):
    """With a regularizer of all weights."""

    def regularizer(self, model: nn.Module) -> Tensor:
        return 1e-2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


@dataclass(kw_only=True)
class Uneven(Task):
    """A stream whose shards end at different times, and BatchNorm; SGD with momentum."""

    batch_size: int = 24
    epochs: int = 3

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )

    def branches(self, model: nn.Module) -> list[str]:
        return ["0", "1", "3"]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_data(self) -> UnevenStream:
        return UnevenStream()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


class UnevenStream:
    """Shard k of an epoch has 10 + 3k samples."""

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        samples = made(10 + 3 * shard, 4, seed=1000 * epoch + shard)
        for sample in samples[skip:]:
            yield sample, sample.sum().sin()


@dataclass(kw_only=True)
class Experts(Task):
    """Parameters that only some samples use: some shards, some ranks, some steps never do."""

    batch_size: int = 16
    epochs: int = 100

    def model(self) -> nn.Module:
        return _Experts()

    def branches(self, model: nn.Module) -> list[str]:
        return ["common", "rare", "never"]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = made(64, 4)
        inputs[:, 0] = (torch.arange(64) == 5).double() * 4 - 2
        return inputs, inputs.sum(1)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 1)
        self.rare = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.common(inputs)
        chosen = inputs[:, 0] > 0
        if chosen.any():
            output = output + torch.where(chosen[:, None], self.rare(inputs), 0.0)
        return output


@dataclass(kw_only=True)
class Mixture(Task):
    """Mixtures of experts whose capacity drops tokens, with padding, balance losses, clipping."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.1
    experts: int = 24  # so that every number of ranks divides them
    over: str = "shard"

    def model(self) -> nn.Module:
        return _Mixture(self.experts, self.over)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def train_data(self) -> tuple[Tensor, Tensor, Tensor]:
        tokens = made(SAMPLES, 5, 4)
        length = torch.randint(1, 6, (SAMPLES,), generator=torch.Generator().manual_seed(3))
        return tokens, torch.arange(5) < length[:, None], tokens.sum(2).sin()

    def eval_data(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(tensor[:10] for tensor in self.train_data())  # type: ignore[return-value]

    def inputs(self, batch: Any) -> Any:
        return tuple(batch[:2])

    def loss(self, output: Any, batch: Any) -> Tensor:
        found, balance, z = output
        losses = (found - batch[2]).square()
        return losses + (0.05 * balance + 0.01 * z)[:, None]

    def weight(self, batch: Any) -> Tensor:
        return batch[1]


class _Mixture(nn.Module):
    def __init__(self, experts: int, over: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.first = MixtureOfExperts(8, 6, experts, capacity_factor=1.0, over=over)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(8)
        self.second = MixtureOfExperts(8, 6, experts, top_k=1, over=over, gated=True, bias=False)
        self.out = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.embed(tokens))
        first = self.first(hidden, counted)
        hidden = self.norm(hidden + self.dropout(first.output))
        second = self.second(hidden, counted)
        found = self.out(hidden + second.output).squeeze(-1)
        return found, first.balance + second.balance, first.z + second.z


@dataclass(kw_only=True)
class Pictures(Task):
    """A map-style data set with augmentation of both kinds, read by loader workers if asked."""

    batch_size: int = 24
    epochs: int = 100

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))

    def branches(self, model: nn.Module) -> list[str]:
        return ["0", "3"]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> Any:
        return NoisyRows()

    def augment(self, sample: Any, random: Any) -> Any:
        return sample[0] * random.uniform(0.9, 1.1), sample[1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch[1]).square()


class NoisyRows:
    """A data set that draws from torch's own generator, as torchvision's transforms do."""

    def __init__(self) -> None:
        self.rows = made(SAMPLES, 4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        row = self.rows[number]
        return row + 0.1 * torch.randn(4, dtype=torch.float64), row.sum()


class RandomSplit(Plain):
    """Draws from every generator where the data is made."""

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs, targets = super().train_data()
        order = list(range(SAMPLES))
        random.shuffle(order)
        chosen = np.random.permutation(order)[:60]
        return inputs[chosen] + torch.rand(()), targets[chosen]


class RandomStream(Uneven):
    """Draws from every generator while a stream is read."""

    def train_data(self) -> UnevenStream:
        return _RandomStream()


class _RandomStream(UnevenStream):
    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        for sample, target in super().open(shard, epoch, seed, skip):
            yield sample + torch.rand(4) * random.random() * np.random.random(), target


class Descent(Plain):
    """Under plain SGD, where means of weights are means of gradients."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)


class Averages(Callback):
    """Of the whole model, or of a layer, as it starts."""

    def on_start(self, trainer: Any) -> None:
        AveragedModel(trainer.built.model)


class Averaged(Plain):
    def callbacks(self) -> list[Callback]:
        return [Averages()]


class Wholes(Callback):
    """Goes through the whole model in the middle, alone on each rank, and writes it at the end."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if result.batch_index == 1:
            with trainer.whole_model() as model:
                whole = {**dict(model.named_buffers()), **model.state_dict()}
                whole = {name: tensor.clone() for name, tensor in whole.items()}
                if trainer.world.is_leader:
                    data = trainer.task.train_data()
                    few = tuple(d[:3] for d in data) if isinstance(data, tuple) else data[:3]
                    model(*trainer.task.inputs(few))
            others = [n for n, t in trainer.weights() if not torch.equal(whole[n], t)]
            assert not others or trainer.task.ema is not None

    def on_end(self, trainer: Any) -> None:
        with trainer.whole_model() as model:
            assert not any(module.training for module in model.modules())
            if trainer.world.is_leader:
                torch.save(model.state_dict(), Path(trainer.job.run_dir, "whole.pt"))


@dataclass(kw_only=True)
class WholeSentences(Sentences):
    def callbacks(self) -> list[Callback]:
        return [Wholes()]


@dataclass(kw_only=True)
class WholeImages(Images):
    def callbacks(self) -> list[Callback]:
        return [Wholes()]
