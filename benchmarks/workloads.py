"""What the loops of `step.py` train: a model, an optimizer and tensors in memory, from one seed.

Every contender trains its own copy from the same initial weights, on the same samples in the same
order, so their losses can be compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from allranks.programs.models.gpt import GPTShape, gpt
from allranks.programs.models.vision import resnet20
from allranks.torch import Task
from allranks.training.order import Order

SEED = 0
CLASSES = 10
GPT_OF_TEXT = GPTShape(vocabulary=256, context=128, width=128, layers=4, heads=4)  # `text`'s own


@dataclass(frozen=True)
class Workload:
    """`batch` samples per rank and step; `samples` in memory; `shape` of one of them."""

    name: str
    batch: int
    samples: int
    shape: tuple[int, ...]
    make_model: Callable[[], nn.Module]
    has_batchnorm: bool = False
    is_adamw: bool = False

    def model(self) -> nn.Module:
        """The model with its initial weights: the same on every rank, for every contender."""
        torch.manual_seed(SEED)
        return self.make_model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.is_adamw:
            return AdamW(model.parameters(), lr=1e-4)
        return SGD(model.parameters(), lr=0.01, momentum=0.9)

    def data(self) -> tuple[Tensor, Tensor]:
        """Random samples, and labels that follow from them, so that there is something to learn."""
        generator = torch.Generator().manual_seed(SEED)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        flat = inputs.flatten(1)
        rule = torch.randn(flat.shape[1], CLASSES, generator=generator)
        return inputs, (flat @ rule).argmax(dim=1)


@dataclass(frozen=True)
class Tokens(Workload):
    """Random tokens below `vocabulary`, `shape[0]` to a sample; the next is to be told from each.

    Each is the one before it plus a number of the sample's own: there is something to learn.
    """

    vocabulary: int = 256

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        first, step = torch.randint(
            self.vocabulary, (2, self.samples, 1), generator=generator
        ).unbind()
        text = (first + step * torch.arange(self.shape[0] + 1)) % self.vocabulary
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def losses_of(output: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample, (n,); of tokens their mean."""
    if output.dim() == 2:
        return F.cross_entropy(output, labels, reduction="none")
    losses = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(len(output), -1).mean(1)


def batches(workload: Workload, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a person writes for data in memory: this rank's slice of each epoch's permutation.

    It is the permutation that allranks uses, so that all contenders see the same samples. Leaner
    than a DataLoader with a DistributedSampler, which gathers sample by sample.
    """
    inputs, labels = workload.data()
    order = Order(workload.samples, workload.batch * ranks, SEED, "drop")
    epoch = 0
    while True:
        for step in range(order.steps_per_epoch):
            start = rank * workload.batch
            chosen = order.batch(epoch, step)[start : start + workload.batch]
            index = torch.from_numpy(chosen)
            yield inputs[index], labels[index]
        epoch += 1


def task_of(workload: Workload, ranks: int, shards: int) -> Task:
    """The same training as a task of allranks."""

    class Measured(Task):
        def model(self) -> nn.Module:
            return workload.model()

        def optimizer(self, model: nn.Module) -> Optimizer:
            return workload.optimizer(model)

        def train_data(self) -> tuple[Tensor, Tensor]:
            return workload.data()

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return losses_of(output, batch[1])

    return Measured(batch_size=workload.batch * ranks, shards=shards, last_batch="drop")


def _mlp(features: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def _deep_mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def _cnn() -> nn.Module:
    def block(channels: int, more: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, more, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(more), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, 16), *block(16, 32), *block(32, 64)]  # (n, 64, 4, 4) from 32 by 32 pixels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, CLASSES))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tiny MLP", 32, 4096, (64,), lambda: _mlp(64, 64)),
        Workload("small CNN", 32, 1024, (3, 32, 32), _cnn, has_batchnorm=True),
        Workload("gradient-heavy MLP", 32, 1024, (1024,), lambda: _mlp(1024, 1024)),
        Workload(
            "gradient-heavy AdamW",
            *(32, 1024, (1024,)),
            make_model=lambda: _mlp(1024, 1024),
            is_adamw=True,
        ),
        Workload("17 M MLP", 8, 1024, (1024,), lambda: _deep_mlp(1024, 16), is_adamw=True),
        Workload("small MLP", 128, 8192, (64,), lambda: _mlp(64, 256)),
        Workload("wide MLP", 128, 2048, (2048,), lambda: _mlp(2048, 2048)),
        Workload("ResNet-20", 64, 1024, (3, 32, 32), resnet20, has_batchnorm=True),
        Tokens("GPT", 16, 1024, (128,), lambda: gpt(GPT_OF_TEXT), is_adamw=True),
    )
}
