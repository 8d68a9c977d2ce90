"""A task that reads TFRecord files of Examples, for the tests of the readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.programs.readers.tfrecord import TFRecords, parse_example
from allranks.torch.task import Task

FILES, PER_FILE, FEATURES = 3, 20, 5


@dataclass(kw_only=True)
class Records(Task):
    """A linear rule learned from a stream."""

    batch_size: int = 12
    epochs: int = 2
    shards: int = 4
    folder: str = ""

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> TFRecords:
        files = [Path(self.folder, f"{n}.tfrecord") for n in range(FILES)]
        return TFRecords(files, self.shards, decoded, buffer=4, on_bad_record="skip")

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output[:, 0], batch[1], reduction="none")


def decoded(record: bytes) -> tuple[np.ndarray, np.float32]:
    example = parse_example(record)
    inputs = np.asarray(example["inputs"])
    return inputs, np.float32(inputs.sum())
