"""Handwritten digits with Keras: the twin of `digits`, for either engine.

The same network, data and optimizer in Keras: images have their channels last. The TensorFlow
engine runs Keras with TensorFlow, the torch engine with torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from allranks.programs.digits_data import TRAINING, digits
from allranks.programs.keras_starts import adamw, batch_norm, convolution, linear
from allranks.tensorflow import Task

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(kw_only=True)
class DigitsKeras(Task):
    """Classify digits; the accuracy on held-out digits is at least 97 %."""

    batch_size: int = 256
    epochs: int = 20
    lr: float = 3e-3
    dropout: float = 0.1
    width: int = 16

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width = {self.width}, and a layer has at least 1 channel")

    def model(self) -> Any:
        width = self.width
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                convolution(1, width, 3, "conv1", padding="same", use_bias=False),
                batch_norm("norm1"),
                keras.layers.ReLU(),
                keras.layers.MaxPooling2D(2),  # (n, 4, 4, width)
                convolution(width, 2 * width, 3, "conv2", padding="same", use_bias=False),
                batch_norm("norm2"),
                keras.layers.ReLU(),
                keras.layers.Flatten(),
                keras.layers.Dropout(self.dropout),
                linear(2 * width * 16, 10, "head"),
            ],
            name="digits",
        )

    def optimizer(self) -> Any:
        return adamw(self.lr)

    def train_data(self) -> Labelled:
        return _digits(slice(0, TRAINING))

    def eval_data(self) -> Labelled:
        return _digits(slice(TRAINING, None))

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = keras.ops.equal(keras.ops.argmax(output, axis=-1), batch[1])
        return {"accuracy": (keras.ops.sum(right), keras.ops.size(right))}


def _digits(part: slice) -> Labelled:
    images, labels = digits(part)
    return images[..., None], labels
