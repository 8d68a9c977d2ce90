"""Keras tasks of the tests: small, of every kind of layer that a strategy could get wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from allranks.programs.keras_programs import DigitsKeras
from allranks.tensorflow import Task
from allranks.training.schedules import Plateau
from small_disk import Filler

SAMPLES = 101  # by 24: four batches and an uneven one of 5, which leaves three shards empty


def digits(samples: int = SAMPLES, seed: int = 1) -> tuple[Any, Any]:
    """Images (n, 6, 6, 1) of noise about one pattern for each of four labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, samples)
    patterns = np.random.default_rng(0).normal(size=(4, 6, 6, 1))
    images = patterns[labels] + random.normal(size=(samples, 6, 6, 1))
    return images.astype(np.float32), labels.astype(np.int64)


@dataclass(kw_only=True)
class Dense(Task):
    """A perceptron: nothing in it knows of shards."""

    batch_size: int = 24
    epochs: int = 10
    lr: float = 0.1
    optimizer_name: str = "SGD"
    samples: int = SAMPLES
    clip_norm: float | None = None

    def model(self) -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Flatten(),
                layers.Dense(16, activation="relu"),
                layers.Dense(4),
            ]
        )

    def optimizer(self) -> Any:
        return getattr(keras.optimizers, self.optimizer_name)(self.lr)

    def train_data(self) -> Any:
        return digits(self.samples)

    def eval_data(self) -> Any:
        return digits(37, seed=2)

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        hits = ops.equal(ops.argmax(output, axis=-1), ops.cast(batch[1], "int64"))
        return {"accuracy": (ops.sum(ops.cast(hits, "float32")), len(batch[1]))}


@dataclass(kw_only=True)
class Convolutions(Dense):
    """BatchNormalization, dropout of rows and of whole channels, regularizers, weights,
    a schedule."""

    lr: float = 0.02

    def model(self) -> Any:
        layers = keras.layers
        small = keras.regularizers.L2(1e-3)
        image = keras.Input((6, 6, 1))
        x = layers.Conv2D(8, 3, padding="same", use_bias=False, kernel_regularizer=small)(image)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.SpatialDropout2D(0.2)(x)
        x = layers.Flatten()(layers.MaxPooling2D()(x))
        x = layers.Dropout(0.3)(layers.BatchNormalization(momentum=0.9, scale=False)(x))
        return keras.Model(image, layers.Dense(4)(x))

    def weight(self, batch: Any) -> Any:
        if ops.max(batch[1]) < 0:  # AutoGraph lets a task ask tensors
            return ops.zeros_like(batch[1], dtype=keras.config.floatx())
        return 1.0 + ops.cast(batch[1], keras.config.floatx())

    def schedule(self, step: int) -> float:
        return 1.0 / (1 + step / 10)


@dataclass(kw_only=True)
class Augmented(Dense):
    """Samples by number, each changed by chance."""

    def train_data(self) -> Any:
        return list(zip(*digits(), strict=True))

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        image, label = sample
        return image + random.normal(size=image.shape).astype(np.float32), label


@dataclass(kw_only=True)
class Poisoned(Dense):
    """Adds a loss in a layer, which would follow the replicas."""

    def model(self) -> Any:
        layers = keras.layers
        kind = keras.regularizers.L2(1e-3)
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Flatten(),
                layers.Dense(4, activity_regularizer=kind),
            ]
        )


@dataclass(kw_only=True)
class Mean(Dense):
    """Takes the mean itself."""

    def loss(self, output: Any, batch: Any) -> Any:
        return ops.mean(super().loss(output, batch))


@dataclass(kw_only=True)
class Weightless(Dense):
    """No sample weighs anything."""

    def weight(self, batch: Any) -> Any:
        return ops.zeros_like(batch[1], dtype=keras.config.floatx())


@dataclass(kw_only=True)
class Averaged(Dense):
    """Keras' own moving average, which `fit` alone puts in the place of the weights."""

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(self.lr, use_ema=True)


@dataclass(kw_only=True)
class Unreached(Dense):
    """A layer whose output is not used,
    and an optimizer that changes weights without a gradient."""

    def model(self) -> Any:
        layers = keras.layers
        image = keras.Input((6, 6, 1))
        flat = layers.Flatten()(image)
        return keras.Model(image, [layers.Dense(4)(flat), layers.Dense(3, name="unused")(flat)])

    def optimizer(self) -> Any:
        return keras.optimizers.AdamW(0.1, weight_decay=0.1)

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output[0], batch)

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        return super().metrics(output[0], batch)


@dataclass(kw_only=True)
class Noisy(Dense):
    """A layer of Keras that draws random numbers."""

    def model(self) -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Flatten(),
                layers.GaussianNoise(0.1),
                layers.Dense(4),
            ]
        )


@dataclass(kw_only=True)
class Columns(Dense):
    """A list where a tuple is meant."""

    def train_data(self) -> Any:
        return list(digits())


def save_start(argument: dict[str, Any]) -> None:
    """In a process of its own: the initial weights of `Started`, as Keras writes them."""
    keras.utils.set_random_seed(3)
    Started(start="").model().save_weights(argument["path"])


class Filling(DigitsKeras):
    """The disk of the run folder is full from an early step on."""

    def callbacks(self) -> list[Filler]:
        return [Filler()]


@dataclass(kw_only=True)
class Started(DigitsKeras):
    """The digits from weights in a file, for two engines that would draw others; without dropout.

    Rate and momentum are exact in 32 bits: Keras rounds them to that on the way to TensorFlow.
    """

    start: str
    dropout: float = 0.0
    lr: float = 0.0625

    def pretrained(self) -> Any:
        return self.start

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(self.lr, momentum=0.875)


@dataclass(kw_only=True)
class Differs(Dense):
    """Rank 1 has other data: a sample less, its own part, or samples of its own."""

    how: str = "shorter"

    def train_data(self) -> Any:
        rank = int(os.environ.get("RANK", "0"))
        images, labels = digits(72)
        if self.how == "shorter":
            return images[: 36 - rank], labels[: 36 - rank]
        if self.how == "cut":
            return images[rank::2], labels[rank::2]
        return [(image + rank, label) for image, label in zip(images, labels, strict=True)]


@dataclass(kw_only=True)
class OnPlateau(Dense):
    """The rate rises with the steps, and falls with every second evaluation: none is better."""

    def schedule(self, step: int, total: int) -> float:  # type: ignore[override]
        return 1 + step / total

    def plateau(self) -> Plateau:
        return Plateau(rule="min:loss", factor=0.5, patience=0, threshold=0.99)
