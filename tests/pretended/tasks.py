"""The task of the pretended device: convolution, BatchNorm, dropout, a buffer, tied weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import batch_kinds
import contract_tasks
import tensor_tasks
from allranks.programs.models.gpt import GPTShape, gpt
from allranks.programs.models.vision import resnet20, resnet50
from allranks.torch import Task
from pretended.streams import NAME

SAMPLES = 29  # the last batch of an epoch is smaller, and some ranks have none of it


class Net(nn.Module):
    def __init__(self, depth: int = 1, width: int = 8) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.dropout, self.wide = nn.Dropout(0.2), nn.Linear(6 * 16, width)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.blocks = nn.Sequential(*layers, nn.Linear(width, 5))

    def forward(self, image: Tensor) -> Tensor:
        found = functional.relu(self.norm(self.convolution(image)))
        output: Tensor = self.blocks(self.wide(self.dropout(found.flatten(1))))
        return output


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    images = torch.randn(count, 2, 4, 4, generator=drawn)
    return images, torch.randint(5, (count,), generator=drawn)


class Images(Dataset[Any]):
    """The same samples, one at a time."""

    def __init__(self) -> None:
        self.images, self.labels = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


@dataclass
class Small(Task):
    """`data` says where samples come from: "host", "device", "set" or "loader"."""

    batch_size: int = 8
    shards: int = 4
    data: str = "host"
    samples: int = SAMPLES
    optimizer_name: str = "sgd"
    depth: int = 1
    width: int = 8

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net(self.depth, self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The kernels of a list, on both devices: on a CPU torch takes others by default."""
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        if self.optimizer_name == "fused":
            return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        how = {"fused": True} if self.optimizer_name == "fused sgd" else {"foreach": True}
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **how)

    def train_data(self) -> Any:
        if self.data == "set":
            return Images()
        if self.data == "loader":
            return DataLoader(Images(), batch_size=self.batch_size, shuffle=True)
        is_there = self.data == "device" and hasattr(torch, NAME)
        return tuple(t.to(NAME) if is_there else t for t in samples(self.samples))

    def eval_data(self) -> Any:
        return samples()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {"right": ((output.argmax(1) == batch[1]).sum(), len(output))}


class Weighted(Small):
    """Of samples that weigh less than 1."""

    def weight(self, batch: Any) -> Tensor:
        return torch.full(batch[1].shape, 0.3, device=batch[1].device)


@dataclass(kw_only=True)
class Few:
    """Small batches of few samples, and the optimizers of `Small`."""

    optimizer_name: str = "sgd"
    batch_size: int = 8
    shards: int = 4
    samples: int = SAMPLES
    optimizer = Small.optimizer


@dataclass(kw_only=True)
class Chain(Few, tensor_tasks.Stack):
    """Layers in a row, which can be cut into stages, and in blocks."""

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs, outputs = super().train_data()
        return inputs[: self.samples], outputs[: self.samples]


@dataclass(kw_only=True)
class Mixture(Few, contract_tasks.Mixture):
    """Mixtures of experts."""

    experts: int = 4

    def train_data(self) -> tuple[Tensor, Tensor, Tensor]:
        tokens, counted, sums = super().train_data()
        return tokens[: self.samples], counted[: self.samples], sums[: self.samples]


@dataclass(kw_only=True)
class Sentences(Few, contract_tasks.Sentences):
    """A transformer, whose positions can be cut."""

    def train_data(self) -> Tensor:
        return super().train_data()[: self.samples]


def words() -> Tensor:
    return torch.randint(16, (32, 4), generator=torch.Generator().manual_seed(5))


@dataclass
class Text(Task):
    """A GPT of 12 layers, whose matrices are large enough for their gradients to be moved."""

    batch_size: int = 8
    shards: int = 2

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return gpt(GPTShape(vocabulary=16, context=4, width=128, layers=12, heads=2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train_data(self) -> Any:
        return words().to(NAME), words().to(NAME)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        each = functional.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="none")
        return each.view(batch[1].shape)


@dataclass
class OfAKind(Small):
    """Batches that are objects of a `kind`."""

    data: str = "set"
    kind: str = "dataclass"

    def collate(self, samples: list[Any]) -> Any:
        images = torch.stack([image for image, _ in samples])
        return batch_kinds.ALL[self.kind](images, torch.stack([label for _, label in samples]))

    def inputs(self, batch: Any) -> Any:
        return batch_kinds.of(batch, "x")

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, (None, batch_kinds.of(batch, "y")))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return super().metrics(output, (None, batch_kinds.of(batch, "y")))


@dataclass
class OfTheBatch(Small):
    """A loss over the whole batch."""

    loss_over = "batch"

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        each = functional.cross_entropy(output, batch[1], reduction="none")
        return each * output.softmax(-1).mean(0).pow(2).sum()


@dataclass(kw_only=True)
class BesideByHand(Task):
    """A model of the catalog: "gpt", "resnet20" or "resnet50"; small numbers, all of its layers."""

    name: str
    layers: int = 12
    dropout: float = 0.0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name == "gpt":
            shape = {"vocabulary": 64, "context": 8, "width": 32, "heads": 2}
            return gpt(GPTShape(layers=self.layers, dropout=self.dropout, **shape))
        return {"resnet20": resnet20, "resnet50": resnet50}[self.name]()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def train_data(self) -> Any:
        drawn = torch.Generator().manual_seed(1)
        count = 4 * self.batch_size
        if self.name == "gpt":
            words = torch.randint(64, (count, 9), generator=drawn)
            data = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        else:
            images = torch.randn(count, 3, 16, 16, generator=drawn)
            data = images, torch.randint(10, (count,), generator=drawn)
        return tuple(tensor.to(NAME) for tensor in data)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        flat = output.flatten(0, -2), batch[1].flatten()
        return functional.cross_entropy(*flat, reduction="none").view(batch[1].shape)
