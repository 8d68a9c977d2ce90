"""Fine-tuning: a net that has learnt the digits 0 to 4 learns 5 to 9 with a new head.

allranks train fine_tuning.py:Pretraining --run-dir runs/first
allranks train fine_tuning.py:FineTuning --set weights=runs/first/weights.safetensors
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from allranks.programs.digits import Digits


class Net(nn.Module):
    """A body that sees, and a head that names."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(16 * 4 * 4, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        named: torch.Tensor = self.head(self.body(images))
        return named


@dataclass(kw_only=True)
class Pretraining(Digits):
    """The digits 0 to 4."""

    batch_size: int = 128
    epochs: int = 8
    first: int = 0

    def model(self) -> nn.Module:
        return Net(classes=5)

    def train_data(self) -> Any:
        return self._chosen(*super().train_data())

    def eval_data(self) -> Any:
        return self._chosen(*super().eval_data())

    def _chosen(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        chosen = (labels >= self.first) & (labels < self.first + 5)
        return images[chosen], labels[chosen] - self.first


@dataclass(kw_only=True)
class FineTuning(Pretraining):
    """The digits 5 to 9: the body is given and stays as it is, the head is new."""

    first: int = 5
    weights: str = ""

    def pretrained(self) -> Any:
        given = load_file(self.weights)
        return {name: tensor for name, tensor in given.items() if not name.startswith("head.")}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.head.parameters(), lr=self.lr)
