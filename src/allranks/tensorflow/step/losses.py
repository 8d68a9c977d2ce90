"""The losses of a micro-batch, one for each sample, and what is not taken for one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.errors import RequestError
from allranks.tensorflow.data.nested import mapped
from allranks.training.keras_task import Task


def weighted_losses(
    task: Task, output: Any, batch: Any, samples: int, kind: Any
) -> tuple[Any, Any]:
    """The weighted losses of a micro-batch, a row per sample, and the sum of their weights."""
    losses = tf.cast(tf.convert_to_tensor(task.loss(full(output, kind), batch)), kind)
    if losses.ndim == 0 or losses.shape[0] != samples:
        raise RequestError(
            asked="loss(output, batch) of the task",
            found=f"values of shape {tuple(losses.shape)} for {samples} samples",
            why="the engine divides by the weight of the whole global batch, so it takes no mean",
            do="return one value for each sample: reduction='none', or a function of keras.losses",
        )
    weights = task.weight(batch)
    if weights is None:
        return losses, tf.cast(tf.size(losses), kind)
    weights = tf.cast(tf.convert_to_tensor(weights), kind)
    if weights.shape != losses.shape:
        raise RequestError(
            asked="weight(batch) of the task",
            found=f"shape {tuple(weights.shape)} for losses of shape {tuple(losses.shape)}",
            why="each value that loss() returns has its own weight",
            do="return the weights in the shape of the losses",
        )
    return losses * weights, tf.reduce_sum(weights)


def full(output: Any, kind: Any) -> Any:
    """An output with numbers of 16 bits as `kind`: no loss and no metric is computed in them."""
    short = (tf.float16, tf.bfloat16)
    return mapped(lambda t: tf.cast(t, kind) if t.dtype in short else t, output)


def check_layer_losses(model: Any) -> None:
    """Raise `RequestError` if a layer has added a loss in the forward pass that was just made."""
    names = [layer.name for layer in model._flatten_layers() if getattr(layer, "_losses", ())]
    if names:
        raise RequestError(
            asked="to train a model whose layers add losses",
            found=f"add_loss, or an activity regularizer, in {', '.join(names)}",
            why="they are means over what one replica sees, so they follow the replicas",
            do="compute them in loss(output, batch), a value for each sample",
        )
