"""What `tensorflow.py` has allranks train to time a start, and when its second step begins.

The learning-rate schedule of a step is asked for before anything else in it, so when the leader
asks for that of the second step, the first is over. The script of the other contender
(`first_step_script.py`) writes the time right after its first step, which is a little earlier: in
its favour.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from allranks.training.keras_task import Task


@dataclass(kw_only=True)
class FirstStep(Task):
    """Two dense layers. `first` is the file to which the leader writes the time."""

    batch_size: int = 32
    first: str = ""

    def model(self) -> Any:
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((8,)), dense(16, activation="relu"), dense(1)])

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(0.1)

    def train_data(self) -> Any:
        return np.ones((64, 8), np.float32), np.ones(64, np.float32)

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.ops.square(output[:, 0] - batch[1])

    def schedule(self, step: int) -> float:
        if step == 1 and os.environ["RANK"] == "0":  # a measurement may know its rank; a task not
            now = time.monotonic()
            Path(self.first).write_text(f"{now} {os.environ['WORLD_SIZE']}")
        return 1.0
