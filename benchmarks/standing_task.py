"""What `standing.py` trains: an MLP with AdamW, whose ranks note when each step has ended."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.torch import Task
from allranks.training.callback import Callback

MORE: list[Tensor] = []


class NoteSteps(Callback):
    """Appends a row for each step: when it ended, and what this process has open by then."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, f"{os.getpid()}.jsonl")

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        row = {"step": result.batch_index, "monotonic": time.monotonic()}
        row |= {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


@dataclass(kw_only=True)
class Standing(Task):
    """Five layers, the three in the middle of `width` times `width`; `notes` is a folder.

    Each rank holds `more_gb` beside the model.
    """

    notes: str = ""
    width: int = 64
    more_gb: int = 0
    batch_size: int = 64
    epochs: int = 1_000_000

    def model(self) -> nn.Module:
        MORE.append(torch.ones(self.more_gb * 2**30, dtype=torch.uint8))
        widths = [32, *4 * [self.width]]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_data(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
        return x, x[:, :10].argmax(1)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def callbacks(self) -> list[Callback]:
        return [NoteSteps(self.notes)]
