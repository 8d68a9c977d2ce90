"""What the loops of `tensorflow.py` train: a Keras model, an optimizer, arrays, from one seed.

Every loop trains its own copy from the same initial weights, on the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from allranks.programs.keras_programs import DigitsKeras
from allranks.training.keras_task import Task
from allranks.training.order import Order

SEED = 0
CLASSES = 10
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True)
class Workload:
    """`batch` samples of a step over all replicas, out of `samples` of `shape` in memory.

    Where a model draws numbers as it goes (dropout), the losses of two loops agree only about.
    """

    name: str
    batch: int
    samples: int
    shape: tuple[int, ...]
    make_model: Callable[[], Any]
    make_optimizer: Callable[[], Any]
    tolerance: float = 1e-3

    def model(self) -> Any:
        """The model with its initial weights: the same for every loop."""
        keras.utils.set_random_seed(SEED)
        return self.make_model()

    def data(self) -> Arrays:
        """Random samples, and labels that follow from them, so that there is something to learn."""
        random = np.random.default_rng(SEED)
        inputs = random.standard_normal((self.samples, *self.shape), np.float32)
        flat = inputs.reshape(self.samples, -1)
        rule = random.standard_normal((flat.shape[1], CLASSES), np.float32)
        return inputs, (flat @ rule).argmax(axis=1)

    def numbers(self, epochs: int) -> NDArray[np.int64]:
        """The numbers of the samples of so many epochs,
        in the order in which allranks takes them."""
        order = Order(self.samples, self.batch, SEED, "drop")
        return np.concatenate(
            [order.batch(e, s) for e in range(epochs) for s in range(order.steps_per_epoch)]
        )

    def task(self, shards: int) -> Task:
        """The same training as a task of allranks."""
        workload = self

        class Measured(Task):
            def model(self) -> Any:
                return workload.model()

            def optimizer(self) -> Any:
                return workload.make_optimizer()

            def train_data(self) -> Arrays:
                return workload.data()

            def loss(self, output: Any, batch: Any) -> Any:
                return losses_of(batch[1], output)

        return Measured(batch_size=self.batch, shards=shards, last_batch="drop")


def losses_of(labels: Any, output: Any) -> Any:
    """The loss of each sample, (samples,)."""
    return keras.losses.sparse_categorical_crossentropy(labels, output, from_logits=True)


def _sgd() -> Any:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _mlp() -> Any:
    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input((64,)),
            dense(64, activation="relu"),
            dense(64, activation="relu"),
            dense(CLASSES),
        ]
    )


def _cnn() -> Any:
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for channels in (32, 64, 128):
        layers += [
            keras.layers.Conv2D(channels, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(2),
        ]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(CLASSES)])


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tiny MLP", 64, 3840, (64,), _mlp, _sgd),
        Workload(
            "digits CNN",
            256,
            2560,
            (8, 8, 1),
            lambda: DigitsKeras().model(),
            lambda: DigitsKeras().optimizer(),
            tolerance=0.1,
        ),
        Workload("larger CNN", 64, 1024, (32, 32, 3), _cnn, _sgd),
    )
}
