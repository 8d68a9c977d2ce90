"""A small Keras task whose model is exported, as a user would write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from allranks.tensorflow import Task


@dataclass(kw_only=True)
class Small(Task):
    hidden: int = 6
    broken: bool = False
    token: str = ""

    def model(self) -> Any:
        layers = keras.layers
        body = [layers.Dense(self.hidden, activation="relu"), layers.BatchNormalization()]
        first = Unsaveable() if self.broken else layers.Dropout(0.5)
        return keras.Sequential([keras.Input((8,)), *body, first, layers.Dense(3)])

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(0.1)

    def train_data(self) -> Any:
        return np.zeros((16, 8), np.float32), np.zeros(16, np.int64)

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)


class Unsaveable(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError("Unsaveable holds an open file")
