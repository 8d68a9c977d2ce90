"""What `audit.py` trains: the models of `share.py`, and an MLP of a million weights."""

from __future__ import annotations

from dataclasses import dataclass

from share_task import Timed
from torch import nn


@dataclass(kw_only=True)
class Audited(Timed):
    """An MLP, a small CNN with BatchNorm and dropout, or a `wide MLP`."""

    shards: int = 8

    def model(self) -> nn.Module:
        if self.model_name != "wide MLP":
            return super().model()
        layers = nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(1024, 10))
