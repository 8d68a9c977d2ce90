"""A step of the TensorFlow engine beside one by hand, with the tape;
runs in a fork of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks.job.job import Job
from allranks.tensorflow import Task
from allranks.tensorflow.trainer import Trainer

SAMPLES, TOKENS, STEPS = 24, 5, 3


def rows() -> tuple[Any, Any, Any]:
    """Tokens (n, t, 3), what follows from them (n, t), and how many of each row count (n,)."""
    random = np.random.default_rng(5)
    tokens = random.normal(size=(SAMPLES, TOKENS, 3))
    return tokens, tokens.sum(-1), random.integers(1, TOKENS + 1, SAMPLES)


@dataclass(kw_only=True)
class Rows(Task):
    """Token weights, a regularizer that outweighs the loss, and clipping;
    all data in each batch."""

    batch_size: int = SAMPLES
    epochs: int = 10
    clip_norm: float | None = None

    def model(self) -> Any:
        layers = keras.layers
        start = keras.initializers.RandomNormal(stddev=0.5, seed=1)
        small = keras.regularizers.L2(2.0)
        first = layers.Dense(4, "tanh", kernel_initializer=start, kernel_regularizer=small)
        last = layers.Dense(1, kernel_initializer=start)
        return keras.Sequential([keras.Input((TOKENS, 3)), first, last])

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(0.125)

    def train_data(self) -> Any:
        return rows()

    def eval_data(self) -> Any:
        return rows()

    def loss(self, output: Any, batch: Any) -> Any:
        return tf.square(output[..., 0] - tf.cast(batch[1], output.dtype))

    def weight(self, batch: Any) -> Any:
        return tf.sequence_mask(batch[2], TOKENS, dtype=keras.config.floatx())


def by_hand(task: Rows, model: Any) -> tuple[list[float], list[float]]:
    """The losses and the lengths of the gradient of a plain loop; `model` is trained by it."""
    batch, losses, lengths = task.train_data(), [], []
    weight = task.weight(batch)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(task.loss(model(batch[0]), batch) * weight) / tf.reduce_sum(weight)
            loss += task.regularizer(model)
        variables = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        length = tf.linalg.global_norm(gradients)
        limit = task.clip_norm or float("inf")
        for variable, gradient in zip(variables, gradients, strict=True):
            ratio = tf.minimum(1.0, limit / (length + 1e-6))  # as torch's clip_grad_norm_
            variable.assign_sub(0.125 * gradient * ratio)
        losses.append(float(loss))
        lengths.append(float(length))
    return losses, lengths


def beside_a_tape(argument: dict[str, Any]) -> None:
    """Losses, lengths, weights, and the loss of the evaluation are those of the plain loop."""
    task = Rows(clip_norm=argument["clip_norm"])
    job = Job(strategy=argument["strategy"], precision="fp64")
    with Trainer(task, job) as trainer:
        plain = task.model()
        plain.set_weights([value.copy() for value in trainer.built.model.get_weights()])
        losses, lengths = by_hand(task, plain)
        results = [trainer.step(batch) for batch in trainer.batches(steps=STEPS)]
        np.testing.assert_allclose([result.loss for result in results], losses, rtol=1e-9)
        np.testing.assert_allclose([result.grad_norm for result in results], lengths, rtol=1e-9)
        pairs = zip(trainer.built.model.get_weights(), plain.get_weights(), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)
        assert min(lengths) > 0.5, "longer than the shortest of the limits"
        found = trainer.evaluate()["loss"]
        batch = task.train_data()
        weighed = task.weight(batch)
        wanted = tf.reduce_sum(task.loss(plain(batch[0]), batch) * weighed) / tf.reduce_sum(weighed)
        np.testing.assert_allclose(found, float(wanted), rtol=1e-9)


def scaled(argument: dict[str, Any]) -> None:
    """Under fp16 the gradient loses the loss scale again, whatever that is."""
    lengths = []
    for scale in ("1", "64", "dynamic:initial=1024"):
        with Trainer(Rows(), Job(strategy="single", precision="fp16", loss_scale=scale)) as trainer:
            (result,) = [trainer.step(batch) for batch in trainer.batches(steps=1)]
            assert result.updated and not result.overflow
            lengths.append(result.grad_norm)
    np.testing.assert_allclose(lengths, lengths[0], rtol=2e-3)


class Counts(keras.layers.Layer):  # type: ignore[misc]
    """Counts its passes, those of evaluations too."""

    def build(self, shape: Any) -> None:
        self.passes = self.add_weight(name="passes", initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.passes.assign_add(1.0)
        return inputs


@dataclass(kw_only=True)
class CountedRows(Rows):
    def model(self) -> Any:
        return keras.Sequential([super().model(), Counts()])


def rehearses(_: dict[str, Any]) -> None:
    """What an evaluation writes before the first step is undone; that of a real one stays."""
    with Trainer(CountedRows(), Job(threads=1)) as trainer:

        def weights() -> dict[str, Any]:
            return {name: np.array(value) for name, value in trainer.weights()}

        before = weights()
        trainer.rehearse()
        assert all(np.array_equal(value, before[name]) for name, value in weights().items())
        trainer.evaluate()
        assert any(not np.array_equal(value, before[n]) for n, value in weights().items())
