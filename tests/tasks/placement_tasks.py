"""A model small enough to count its bytes by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import contract_tasks


@dataclass(kw_only=True)
class Small(contract_tasks.Plain):
    """A linear layer and a BatchNorm, AdamW."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.sum(1) - batch[1]).square()


class NoModel(Small):
    """Is loaded well, and cannot be set up."""

    def model(self) -> Any:
        return "a model"
