"""What `share.py` trains: a small model, whose leader notes when each step ended.

The ranks are made slow by `--inject slow`, so that what a step takes is known beforehand. Run as a
script it is one process, which trains the model with 8 and with 64 shards in turn, step by step,
and prints the seconds of both.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.job.job import Job
from allranks.torch import Task, Trainer
from allranks.training.callback import Callback

SAMPLES = 4096


class _Clock(Callback):
    """Writes the monotonic time at the end of each step of the leader to a file, at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, list[float]()

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        self.times.append(time.monotonic())

    def on_end(self, trainer: Any) -> None:
        if trainer.world.is_leader:
            self.path.write_text(json.dumps(self.times))


@dataclass(kw_only=True)
class Timed(Task):
    """An MLP, or a small CNN with BatchNorm and dropout; `notes` is the file of the times."""

    model_name: str = "MLP"
    notes: str = ""
    batch_size: int = 256
    epochs: int = 1000
    shards: int = 64

    def model(self) -> nn.Module:
        if self.model_name == "MLP":
            layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
            return nn.Sequential(nn.Flatten(), *layers, nn.Linear(256, 10))
        first = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        second = nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2)
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 36, 10))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01)

    def train_data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        return images, torch.randint(10, (SAMPLES,), generator=generator)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def callbacks(self) -> list[Callback]:
        return [_Clock(Path(self.notes))] if self.notes else []


WARM_STEPS = 20


def fine_beside_coarse(model_name: str, steps: int) -> list[tuple[float, float]]:
    """The seconds of a step with 64 shards, and with 8, for each pair of steps."""
    torch.set_num_threads(1)
    trainers = [Trainer(Timed(model_name=model_name, shards=n), Job()) for n in (64, 8)]
    batches = [trainer.batches() for trainer in trainers]
    pairs = []
    for pair in range(WARM_STEPS + steps):
        seconds = [0.0, 0.0]
        for turn in (0, 1) if pair % 2 else (1, 0):
            began = time.perf_counter()
            trainers[turn].step(next(batches[turn]))
            seconds[turn] = time.perf_counter() - began
        pairs.append((seconds[0], seconds[1]))
    for trainer in trainers:
        trainer.close(failed=True)
    return pairs[WARM_STEPS:]


if __name__ == "__main__":
    print(json.dumps(fine_beside_coarse(sys.argv[1], int(sys.argv[2]))))
