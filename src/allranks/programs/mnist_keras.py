"""MNIST with Keras: the twin of `mnist`, for either engine; images have their channels last.

The network of the first Keras example and of torch's,
as `allranks.programs.models.mnist` has it for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from allranks.programs.keras_starts import adamw, convolution, linear
from allranks.programs.mnist_data import CLASSES, MNIST, TEST, TRAINING, DownloadedFiles
from allranks.programs.readers.stream import OnBadRecord
from allranks.tensorflow import Task

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(kw_only=True)
class MnistKeras(Task):
    """Classify handwritten digits. With `download` off nothing is fetched."""

    batch_size: int = 128
    epochs: int = 12
    lr: float = 1e-3
    data: str = "data"
    download: bool = True
    on_bad_record: OnBadRecord = "stop"

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
                linear(128, CLASSES, "head"),
            ],
            name="mnist",
        )

    def optimizer(self) -> Any:
        return adamw(self.lr)

    def train_data(self) -> Labelled:
        return self._labelled(*TRAINING)

    def eval_data(self) -> Labelled:
        return self._labelled(*TEST)

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = keras.ops.equal(keras.ops.argmax(output, axis=-1), batch[1])
        return {"accuracy": (keras.ops.sum(right), keras.ops.size(right))}

    def _labelled(self, images: str, labels: str) -> Labelled:
        files = DownloadedFiles(
            MNIST, self.data, self.download, self.on_bad_record, type(self).__name__
        )
        pictures, numbers = files.labelled(images, labels)
        return pictures[..., None], numbers
