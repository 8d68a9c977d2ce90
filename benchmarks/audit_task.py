"""What `audit.py` trains: the models of `share.py`, an MLP of a million weights, a tiny one."""

from __future__ import annotations

from dataclasses import dataclass

from share_task import Timed
from torch import Tensor, nn


@dataclass(kw_only=True)
class Audited(Timed):
    """An MLP, a small CNN, a `wide MLP`, or a `tiny` one; CNN and tiny have BatchNorm and dropout.

    Another `seed_of_data` is another training.
    """

    shards: int = 8
    seed_of_data: int = 0

    def model(self) -> nn.Module:
        if self.model_name == "tiny":
            first = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
            return nn.Sequential(nn.Flatten(), *first, nn.Linear(8, 10))
        if self.model_name != "wide MLP":
            return super().model()
        layers = nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(1024, 10))

    def train_data(self) -> tuple[Tensor, Tensor]:
        images, labels = super().train_data()
        return images.roll(self.seed_of_data, 0), labels
