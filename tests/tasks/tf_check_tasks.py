"""Keras tasks for `check`: right ones that look wrong, wrong ones that train all the same, and one
that breaks a line of the engine in its own processes."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks.tensorflow import Task
from allranks.tensorflow.build import value_of
from allranks.training.callback import Callback
from tf_faults import FAULTS, Fault
from tf_tasks import Convolutions, Dense

layers = keras.layers


# --- right ones ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Words(Task):
    """An embedding, whose gradient is sparse, and tokens that count nothing."""

    batch_size: int = 24
    epochs: int = 10
    clip_norm: float | None = 0.5

    def model(self) -> Any:
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(11, 6),
                layers.LayerNormalization(),
                layers.Dense(11),
            ]
        )

    def optimizer(self) -> Any:
        return keras.optimizers.AdamW(0.01)

    def train_data(self) -> Any:
        random = np.random.default_rng(3)
        return random.integers(0, 11, (101, 5)), random.integers(1, 6, 101)

    def eval_data(self) -> Any:
        return self.train_data()

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Any:
        wanted = tf.roll(batch[0], 1, 1)
        return keras.losses.sparse_categorical_crossentropy(wanted, output, from_logits=True)

    def weight(self, batch: Any) -> Any:
        return tf.sequence_mask(batch[1], 5, dtype=keras.config.floatx())


class Clamp(Callback):
    """Keeps weights small, after each step."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        for variable in trainer.built.model.trainable_variables:
            variable.assign(np.clip(value_of(variable), -0.1, 0.1))


@dataclass(kw_only=True)
class Clamped(Dense):
    """A frozen layer, a bias before BatchNormalization, and weights changed between the steps."""

    def model(self) -> Any:
        frozen = layers.Dense(16, trainable=False)
        parts = [layers.Flatten(), frozen, layers.Dense(9), layers.BatchNormalization()]
        return keras.Sequential([keras.Input((6, 6, 1)), *parts, layers.ReLU(), layers.Dense(4)])

    def callbacks(self) -> list[Callback]:
        return [Clamp()]


# --- wrong ones ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Centred(Dense):
    """A loss whose samples see each other."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output - tf.reduce_mean(output, 0), batch)


class _Counts(layers.Layer):  # type: ignore[misc]
    """Keeps the mean of the samples that it saw last."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), trainable=False, name="seen")

    def call(self, inputs: Any) -> Any:
        self.seen.assign(tf.reduce_mean(inputs))
        return inputs


@dataclass(kw_only=True)
class Codebook(Dense):
    """A variable that the model writes itself."""

    def model(self) -> Any:
        parts = [layers.Flatten(), _Counts(), layers.Dense(4)]
        return keras.Sequential([keras.Input((6, 6, 1)), *parts])


class Walk(Callback):
    """Moves the weights of each rank by itself."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        variable = trainer.built.model.trainable_variables[0]
        variable.assign(np.asarray(variable) + 1e-3 * trainer.world.rank)


@dataclass(kw_only=True)
class Walks(Dense):
    """A callback that does another thing on each rank."""

    def callbacks(self) -> list[Callback]:
        return [Walk()]


@tf.custom_gradient
def _by_its_batch(inputs: Any) -> Any:
    def gradient(upstream: Any) -> Any:
        return upstream / tf.cast(tf.shape(inputs)[0], upstream.dtype)

    return tf.identity(inputs), gradient


@dataclass(kw_only=True)
class OwnMean(Dense):
    """A gradient that is divided by the samples of its micro-batch."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(_by_its_batch(output), batch)


# --- a line of the engine broken ------------------------------------------------------------------


def plant(fault: Fault) -> None:
    """Break the engine in this process."""
    module_name, _, path = fault.place.partition(":")
    module = importlib.import_module(module_name)
    function: Any = module
    for name in path.split("."):
        function = getattr(function, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.line) == 1, fault
    broken = textwrap.indent(source.replace(fault.line, fault.becomes), "    ")
    cell = ", ".join(function.__code__.co_freevars)  # `__class__`, where it calls super()
    names = dict(vars(module))
    exec(f"def made({cell}):\n{broken}\n    return {function.__name__}", names)
    made = names["made"](*function.__code__.co_freevars)
    function.__code__ = made.__code__


@dataclass(kw_only=True)
class Broken(Convolutions):
    """Trained by an engine in which the line of a fault is broken, in one process and in many."""

    fault: str
    weighted: bool = True
    regularized: bool = True

    def model(self) -> Any:
        plant(FAULTS[self.fault])
        return super().model()

    def weight(self, batch: Any) -> Any:
        return super().weight(batch) if self.weighted else None

    def regularizer(self, model: Any) -> Any:
        return super().regularizer(model) if self.regularized else None
