"""Programs with Keras: the twins of `digits` and `mnist`, for either engine.

The same networks, data and optimizer in Keras: images have their channels last. The TensorFlow
engine runs Keras with TensorFlow, the torch engine with torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from allranks.programs import mnist_data
from allranks.programs.digits_data import TRAINING, DigitsFields, digits
from allranks.tensorflow import Task

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]

# --- layers --------------------------------------------------------------------------------------
# Keras layers with torch's default initial weights, so that twins start alike.
#
# Torch: convolutions and linear layers are uniform within 1 / sqrt(inputs of a unit), biases too
# (He et al. 2015, arXiv 1502.01852, with the slope that gives this). Keras' own defaults differ.
# Every layer has a name, so that names of weights do not depend on earlier models.


def convolution(inputs: int, outputs: int, size: int, name: str, **keywords: Any) -> Any:
    """A `Conv2D` of `inputs` channels to `outputs`."""
    starts = _starts(inputs * size * size, keywords)
    return keras.layers.Conv2D(outputs, size, name=name, **starts, **keywords)


def linear(inputs: int, outputs: int, name: str) -> Any:
    """A `Dense` layer without an activation."""
    return keras.layers.Dense(outputs, name=name, **_starts(inputs, {}))


def batch_norm(name: str) -> Any:
    """A `BatchNormalization` with torch's momentum: a tenth of each new moment."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def _starts(fan_in: int, keywords: dict[str, Any]) -> dict[str, Any]:
    bound = fan_in**-0.5
    names = ["kernel_initializer"]
    if keywords.get("use_bias", True):
        names.append("bias_initializer")
    return {name: keras.initializers.RandomUniform(-bound, bound) for name in names}


# --- programs -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class KerasClassifier(Task):
    """A task whose samples belong to one of some classes, by the largest of the model's outputs."""

    lr: float

    def optimizer(self) -> Any:
        """AdamW with torch's defaults; Keras adds epsilon before bias correction, torch after."""
        return keras.optimizers.AdamW(self.lr, weight_decay=1e-2, epsilon=1e-8)

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = keras.ops.equal(keras.ops.argmax(output, axis=-1), batch[1])
        return {"accuracy": (keras.ops.sum(right), keras.ops.size(right))}


@dataclass(kw_only=True)
class DigitsKeras(DigitsFields, KerasClassifier):
    """The twin of `digits`; the accuracy on held-out digits is at least 97 %."""

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

    def train_data(self) -> Labelled:
        return self._digits(slice(0, TRAINING))

    def eval_data(self) -> Labelled:
        return self._digits(slice(TRAINING, None))

    def _digits(self, part: slice) -> Labelled:
        images, labels = digits(part)
        return images[..., None], labels


@dataclass(kw_only=True)
class MnistKeras(mnist_data.MnistFields, KerasClassifier):
    """The twin of `mnist`. With `download` off nothing is fetched."""

    def model(self) -> Any:
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                convolution(1, 32, 3, "conv1", activation="relu"),
                convolution(32, 64, 3, "conv2", activation="relu"),
                keras.layers.MaxPooling2D(2),  # (n, 12, 12, 64)
                keras.layers.Dropout(0.25),
                keras.layers.Flatten(),
                linear(64 * 12 * 12, 128, "hidden"),
                keras.layers.ReLU(),
                keras.layers.Dropout(0.5),
                linear(128, mnist_data.CLASSES, "head"),
            ],
            name="mnist",
        )

    def train_data(self) -> Labelled:
        return self._labelled(*mnist_data.TRAINING)

    def eval_data(self) -> Labelled:
        return self._labelled(*mnist_data.TEST)

    def _labelled(self, images: str, labels: str) -> Labelled:
        pictures, numbers = self.labelled(images, labels)
        return pictures[..., None], numbers
