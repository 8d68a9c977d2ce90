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
