"""Synthetic data, a new batch each step: for measuring a step without reading data.

The samples of a shard follow from (seed, epoch, shard), so every run with one seed sees the same
batches, on any number of ranks. The labels follow from the inputs by a fixed linear rule, so the
loss falls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.torch.task import Task
from allranks.training.order import random_key

BLOCK = 256


@dataclass(kw_only=True)
class Synthetic(Task):
    """Classify random vectors with a multi-layer perceptron of `layers` hidden layers."""

    batch_size: int = 256
    features: int = 64
    width: int = 256
    layers: int = 2
    classes: int = 10
    lr: float = 0.1
    samples_per_shard: int = 4096

    def model(self) -> nn.Module:
        sizes = [self.features, *[self.width] * self.layers]
        hidden = [
            layer
            for narrow, wide in itertools.pairwise(sizes)
            for layer in (nn.Linear(narrow, wide), nn.ReLU())
        ]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], self.classes))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def train_data(self) -> _Stream:
        return _Stream(self.samples_per_shard, self.features, self.classes)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class _Stream:
    """Samples generated on reading: `open` returns those of one shard in one epoch."""

    def __init__(self, samples: int, features: int, classes: int) -> None:
        self.samples, self.features, self.classes = samples, features, classes

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        rule = torch.randn(
            self.features, self.classes, generator=torch.Generator().manual_seed(seed)
        )
        for start in range(skip - skip % BLOCK, self.samples, BLOCK):
            generator = torch.Generator().manual_seed(random_key(seed, epoch, shard, start))
            inputs = torch.randn(BLOCK, self.features, generator=generator)
            labels = (inputs @ rule).argmax(dim=1)
            first = max(skip - start, 0)
            yield from zip(
                inputs[first : self.samples - start],
                labels[first : self.samples - start],
                strict=True,
            )
