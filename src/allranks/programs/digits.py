"""Handwritten digits: 1,797 real images of 8 by 8 pixels, which come with scikit-learn.

A small convolutional network with BatchNorm and dropout; a fifth of the digits is held out. The
data is embedded, so nothing is downloaded. Alpaydin and Kaynak 1998, UCI repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from allranks.programs.digits_data import TRAINING, DigitsFields, digits
from allranks.torch.task import Task


@dataclass(kw_only=True)
class Digits(DigitsFields, Task):
    """Classify digits; the accuracy on held-out digits is at least 97 %."""

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (n, width, 4, 4)
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * width * 16, 10),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return _digits(slice(0, TRAINING))

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return _digits(slice(TRAINING, None))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = output.argmax(dim=1) == batch[1]
        return {"accuracy": (right.sum(), len(right))}


def _digits(part: slice) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) in [0, 1] and labels (n,), in an order that mixes the writers."""
    images, labels = digits(part)
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)
