"""A task for devices of too little memory: a rank has room for so many rows of one pass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bad_tasks import Good


class Room(nn.Module):
    """Raises what torch raises on a full device, where a pass that trains has over `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.training and len(rows) > self.rows:
            raise torch.OutOfMemoryError(f"out of memory: {len(rows)} rows, room for {self.rows}")
        return rows


@dataclass(kw_only=True)
class Narrow(Good):
    """Rank 1 has room for `narrow` rows, others for `wide`: in each half of the model."""

    batch_size: int = 32
    epochs: int = 3
    wide: int = 12
    narrow: int = 6
    norm: bool = False

    def model(self) -> nn.Module:
        rows = self.narrow if os.environ.get("RANK") == "1" else self.wide
        norm = [nn.BatchNorm1d(8)] if self.norm else []
        first = nn.Sequential(nn.Linear(3, 8), *norm, nn.Dropout(0.2), nn.Tanh(), Room(rows))
        return nn.Sequential(first, nn.Sequential(nn.Linear(8, 2), Room(rows)))

    def train_data(self) -> Any:
        rows = torch.randn(128, 3, generator=torch.Generator().manual_seed(1))
        return rows, (rows.sum(dim=1) > 0).long()
