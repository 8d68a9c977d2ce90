"""The task of a Keras model: what a user writes. A dataclass whose fields are the hyper-parameters.

Written as if for one device: no strategy, no scope, no mean. Four methods are needed (`model`,
`optimizer`, `train_data`, `loss`). Nothing here imports TensorFlow or Keras: the torch engine
trains the same task, with Keras on top of torch, as long as its methods compute with `keras.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allranks.training.task_fields import TaskFields


@dataclass(kw_only=True)
class Task(TaskFields):
    """A training of a Keras 3 model, described for one device.

    It has all that `TaskFields` has. A batch is what `train_data` is made of, with the samples
    along axis 0 of every array: for a pair of arrays, a pair.
    """

    required = ("model", "optimizer", "train_data", "loss")

    def model(self) -> Any:
        """The `keras.Model`, built, with its initial weights; the same on every rank.

        Keras draws initial weights from its global seed, which is set before this is called.
        """
        raise NotImplementedError

    def optimizer(self) -> Any:
        """The `keras.optimizers.Optimizer`."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """Arrays (or a tuple or dict of them), samples by number, or a `tf.data.Dataset`.

        A data set with samples by number has `__getitem__` and `__len__`. A `tf.data.Dataset` is
        called for anew in each epoch, keyed by (seed, epoch), and is of samples, or of batches of
        `batch_size`.
        """
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Any:
        """The loss of each sample, (samples,), or of each token, (samples, tokens). Never a mean.

        The functions of `keras.losses` (`keras.losses.sparse_categorical_crossentropy`) are so.
        """
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """What goes into the model."""
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def regularizer(self, model: Any) -> Any:
        """A scalar that depends on the weights alone, added to the loss once per step.

        The default: the sum of the regularizers that the layers of the model were given.
        """
        terms = [v.regularizer(v) for v in model.trainable_variables if v.regularizer is not None]
        return sum(terms[1:], terms[0]) if terms else None

    def pretrained(self) -> Any:
        """A `.weights.h5` or `.keras` file with the weights to start from; `None`: initial ones."""
        return None

    def eval_data(self) -> Any:
        """What the model is judged on: as `train_data`. `None`: nothing."""
        return None
