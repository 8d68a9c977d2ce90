"""The tasks of the contract, for ranks that know `fake_sharded` and `fake_reducer` too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import contract_workers
import fake_reducer
import fake_sharded
from allranks.training.callback import Callback
from contract_tasks import (
    Experts,
    Images,
    Mixture,
    Pairs,
    Pictures,
    Plain,
    Sentences,
    Uneven,
    UnevenStream,
    Words,
)
from deferred_tasks import OnMeta

__all__ = [
    "Experts",
    "Images",
    "Mixture",
    "OnMeta",
    "Pairs",
    "Pictures",
    "Sentences",
    "Uneven",
    "Words",
]

fake_sharded.register()
fake_reducer.register()


@dataclass(kw_only=True)
class Infinite(Uneven):
    """A stream whose shard 3 ends with a sample that is infinite, in the loss or in the model.

    On two ranks it is the last one of rank 0, and 4 steps follow.
    """

    within: str = "loss"

    def model(self) -> nn.Module:
        return nn.Sequential(_Over(self.within == "model"), *super().model())  # type: ignore[misc]

    def train_data(self) -> UnevenStream:
        return _EndsInfinite()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) / _divisor(batch[0])[:, 0]


class _EndsInfinite(UnevenStream):
    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        last = 10 + 3 * shard - 1
        stream = super().open(shard, epoch, seed, skip)
        for number, (sample, target) in enumerate(stream, start=skip):
            if shard == 3 and number == last:
                sample[0] = MARK
            yield sample, target


class _Over(nn.Module):
    """Divides by zero, for a marked sample."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.divides = divides
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        divided = inputs / _divisor(inputs) if self.divides else inputs
        return divided * self.weight


MARK = 77.0


def _divisor(inputs: Tensor) -> Tensor:
    return (inputs[:, :1] != MARK).to(inputs.dtype)


@dataclass(kw_only=True)
class Unfreezes(Plain):
    """A second model beside the first one, with a loss of its own, is trained after `at` steps."""

    at: int = 0

    def model(self) -> nn.Module:
        return _Beside()

    def callbacks(self) -> list[Any]:
        return [_Unfreezing(self.at)]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1][:, None]).square().sum(1)


class _Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.first(inputs), self.beside(inputs)], dim=1)


class _Unfreezing(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if self.at and trainer.progress.batch_index == self.at:
            trainer.strategy.model.beside.requires_grad_(True)


def go_on_from_a_state(argument: dict[str, Any]) -> None:
    """As in `contract_workers`."""
    contract_workers.go_on_from_a_state(argument)


class Apart(Words):
    """Weights that no seed decides."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            model.mix.bias.fill_(random.SystemRandom().random())
        return model
