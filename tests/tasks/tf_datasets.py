"""Keras tasks whose data is a tf.data.Dataset. Apart, as they import TensorFlow themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_tasks import Dense, digits


@dataclass(kw_only=True)
class Batched(Dense):
    """Shuffled by TensorFlow, in batches."""

    def train_data(self) -> Any:
        data = tf.data.Dataset.from_tensor_slices(digits())
        return data.shuffle(200).batch(self.batch_size)


@dataclass(kw_only=True)
class OneByOne(Dense):
    """Samples, evaluated as a data set too."""

    def train_data(self) -> Any:
        return tf.data.Dataset.from_tensor_slices(digits()).shuffle(200)

    def eval_data(self) -> Any:
        return tf.data.Dataset.from_tensor_slices(digits(37, seed=2))


@dataclass(kw_only=True)
class Filtered(Dense):
    """Of a length that nobody knows: 96 of 101 samples."""

    def train_data(self) -> Any:
        numbered = tf.data.Dataset.from_tensor_slices(digits()).enumerate()
        kept = numbered.filter(lambda number, sample: number < 96)
        return kept.map(lambda number, sample: sample).batch(self.batch_size)


@dataclass(kw_only=True)
class Small(Dense):
    """Batches that are smaller than the global batch."""

    def train_data(self) -> Any:
        return tf.data.Dataset.from_tensor_slices(digits()).batch(8)


@dataclass(kw_only=True)
class Nothing(Dense):
    """No sample."""

    def train_data(self) -> Any:
        return tf.data.Dataset.from_tensor_slices(digits()).take(0)
