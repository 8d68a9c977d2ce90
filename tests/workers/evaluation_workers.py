"""Ranks that evaluate a few samples, and tasks of the tests of exact evaluation and of layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import contract_tasks
from allranks.job.job import Job
from allranks.torch import Trainer

SAMPLES = 10


@dataclass(kw_only=True)
class Words(contract_tasks.Words):
    """Token weights, and a metric over tokens that count."""

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        counts = self.weight(batch)
        right = (output.argmax(2) == batch["text"][:, 1:]) & counts
        return {"accuracy": (right.sum(), counts.sum()), "samples": (len(right), 1)}

    def eval_data(self) -> dict[str, Tensor]:
        return {name: tensor[:SAMPLES] for name, tensor in self.train_data().items()}


def ten_samples(argument: dict[str, Any]) -> None:
    """The evaluation, in chunks of a shard; every rank writes down what it was told."""
    task = Words(batch_size=argument["batch_size"])
    with Trainer(task, Job(precision="fp64")) as trainer:
        path = Path(argument["out"]) / f"{trainer.world.size}-{trainer.world.rank}.json"
        path.write_text(json.dumps(trainer.evaluate()))


@dataclass(kw_only=True)
class WeightedImages(contract_tasks.Images):
    """Images whose samples count for 1, 2 or 3."""

    dropout: float = 0.0

    def weight(self, batch: Any) -> Tensor:
        return 1.0 + batch[1].to(torch.get_default_dtype())
