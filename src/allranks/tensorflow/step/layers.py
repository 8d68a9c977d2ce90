"""Keras layers that belong to a shard: BatchNormalization and dropout that know no ranks.

They are swapped into the model in place for the training (`swap_layers`), and put back at its end.
While the graph of a step is made, `GraphPass` tells them which rows belong to which shard:

* BatchNormalization normalises each shard by its own moments, and collects them; the moving
  statistics take one update per step, from the sample-weighted moments of all shards of all
  replicas. A shard of one sample is normalised by the moving statistics and adds nothing to them.
* Dropout draws its mask from a counter: (seed, step, shard, layer, call).

Samples are expected along axis 0; a layer may see several rows per sample (tokens).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from allranks.errors import RequestError
from allranks.strategies.shards import Micro
from allranks.training.keras_task import Task

_here = threading.local()  # tf.distribute makes the graph of each replica in a thread of its own


@dataclass
class GraphPass:
    """What goes through the model in the part of the graph that is being made.

    `key` is a scalar tensor, int64, that belongs to (seed, step).
    """

    pieces: Micro
    samples: int
    key: Any
    calls: dict[int, int] = field(default_factory=dict)
    moments: dict[int, Any] = field(default_factory=dict)

    def rows(self, layer: str, tensor: Any) -> list[int]:
        """How many rows of `tensor` belong to each piece."""
        rows = tensor.shape[0]
        per_sample, remainder = divmod(rows or 0, self.samples)
        if remainder or not per_sample:
            raise RequestError(
                asked=f"{layer} on a tensor of shape {tuple(tensor.shape)}",
                found=f"{rows} rows for {self.samples} samples",
                why="rows are given to shards, so axis 0 must run over the samples",
                do="put the samples first before this layer",
            )
        return [piece.samples * per_sample for piece in self.pieces]


@contextmanager
def passing(graph_pass: GraphPass) -> Iterator[GraphPass]:
    """Within, `graph_pass` goes through the model, in this thread."""
    _here.passing = graph_pass
    try:
        yield graph_pass
    finally:
        _here.passing = None


def _now() -> GraphPass | None:
    return getattr(_here, "passing", None)


class ShardBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """BatchNormalization over each shard by itself. Made of one of Keras by `swap_layers`."""

    shard_index: int

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        now = _now()
        if not training or now is None or not self.trainable:
            return super().call(inputs, training=False, mask=mask)
        if mask is not None:
            raise _unlike(self, "a mask", "its moments would leave samples out by their tokens")
        full = tf.cast(inputs, tf.as_dtype(keras.backend.result_type(inputs.dtype, "float32")))
        rows = now.rows("BatchNormalization", inputs)
        outputs = [
            self._normalised(now, piece.shard_size, piece.samples, part)
            for piece, part in zip(now.pieces, tf.split(full, rows), strict=True)
        ]
        whole = outputs[0] if len(outputs) == 1 else tf.concat(outputs, 0)
        return tf.cast(whole, self.compute_dtype)

    def _normalised(self, now: GraphPass, shard_size: int, samples: int, part: Any) -> Any:
        if shard_size == 1:
            mean, variance = self._read(self.moving_mean), self._read(self.moving_variance)
        else:
            mean, variance = tf.nn.moments(
                part, [a for a in range(part.ndim) if a != self._axis(part)]
            )
            moments = samples * tf.concat([tf.ones(1, mean.dtype), mean, variance], 0)
            moments = tf.stop_gradient(moments)
            before = now.moments.get(self.shard_index)
            now.moments[self.shard_index] = moments if before is None else before + moments
        shape = [1] * part.ndim
        shape[self._axis(part)] = -1
        gamma = self._read(self.gamma) if self.scale else None
        beta = self._read(self.beta) if self.center else None
        terms = [
            None if t is None else tf.reshape(tf.cast(t, part.dtype), shape)
            for t in (mean, variance, beta, gamma)
        ]
        return tf.nn.batch_normalization(part, *terms, self.epsilon)

    def _axis(self, part: Any) -> int:
        return int(self.axis) % int(part.ndim)

    def _read(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable)

    @property
    def moment_size(self) -> int:
        """How many numbers its moments are: the samples, a mean and a variance of each channel."""
        return 1 + 2 * int(self.moving_mean.shape[0])

    def update_moving(self, moments: Any) -> None:
        """One update of the moving statistics, in the graph: nothing if no shard had moments."""
        weight = moments[0]
        mean, variance = tf.split(moments[1:] / tf.maximum(weight, 1), 2)
        for variable, statistic in ((self.moving_mean, mean), (self.moving_variance, variance)):
            was = self._read(variable)
            new = was * self.momentum + tf.cast(statistic, was.dtype) * (1 - self.momentum)
            variable.assign(tf.where(weight > 0, new, was))


class KerasShardDropout(keras.layers.Dropout):  # type: ignore[misc]
    """Dropout whose mask belongs to the shard. Made of one of Keras by `swap_layers`."""

    shard_index: int
    shared_axes: int

    def call(self, inputs: Any, training: bool = False) -> Any:
        now = _now()
        if not training or not self.rate or now is None:
            return super().call(inputs, training=False)
        call = now.calls.get(self.shard_index, 0)
        now.calls[self.shard_index] = call + 1
        rows = now.rows("Dropout", inputs)
        noise = self._noise_shape(inputs)
        draws = []
        for piece, count in zip(now.pieces, rows, strict=True):
            seed = tf.stack([now.key, _mixed(piece.shard, self.shard_index, call)])
            per_sample = count // piece.samples
            shape = [piece.shard_size * per_sample, *noise]
            whole = tf.random.stateless_uniform(shape, seed)
            draws.append(whole[piece.start * per_sample : piece.stop * per_sample])
        mask = tf.concat(draws, 0) >= self.rate
        return inputs * tf.cast(mask, inputs.dtype) / (1 - self.rate)

    def _noise_shape(self, inputs: Any) -> list[int]:
        """The shape of the mask of one row: axes that share a draw have length 1."""
        shape = [int(size) for size in inputs.shape[1:]]
        noise_shape = getattr(self, "noise_shape", None)
        if noise_shape is not None and noise_shape[0] is not None:
            why = "one mask for all samples of a batch would be one for each micro-batch"
            raise _unlike(self, f"noise_shape={tuple(noise_shape)}", why)
        if noise_shape is not None:
            return [
                size if wanted is None else int(wanted)
                for size, wanted in zip(shape, noise_shape[1:], strict=True)
            ]
        channels_first = getattr(self, "data_format", "channels_last") == "channels_first"
        first = 1 if channels_first else 0
        for axis in range(first, first + self.shared_axes):
            shape[axis] = 1
        return shape


def _mixed(shard: int, layer: int, call: int) -> int:
    return (shard << 40) + (layer << 20) + call


DROPOUTS = {
    keras.layers.Dropout: 0,  # axes beside samples and channels that share one draw
    keras.layers.SpatialDropout1D: 1,
    keras.layers.SpatialDropout2D: 2,
    keras.layers.SpatialDropout3D: 3,
}


def swap_layers(model: Any) -> dict[str, list[str]]:
    """Swap the layers of `model` in place. Returns the names swapped, and those that cannot be.

    `user_randomness` names layers that draw from generators of Keras: those follow the replica.
    """
    names: dict[str, list[str]] = {"batchnorm": [], "dropout": [], "user_randomness": []}
    for index, layer in enumerate(model._flatten_layers()):
        kind = type(layer)
        if kind is keras.layers.BatchNormalization:
            if layer.synchronized:
                why = "it communicates in forward, out of the engine's sight"
                raise _unlike(layer, "synchronized=True", why)
            layer.__class__ = ShardBatchNormalization
            names["batchnorm"].append(layer.name)
        elif kind in DROPOUTS:
            layer.__class__ = type(f"Shard{kind.__name__}", (KerasShardDropout, kind), {})
            layer.shared_axes = DROPOUTS[kind]
            names["dropout"].append(layer.name)
        elif isinstance(layer, keras.layers.BatchNormalization):
            raise _unlike(layer, kind.__name__, "it may update its statistics in another way")
        else:
            if getattr(layer, "_seed_generators", ()):
                names["user_randomness"].append(layer.name)
            continue
        layer.shard_index = index
    return names


def restore_layers(model: Any) -> None:
    """Undo `swap_layers`: the model is Keras' own again, and can be saved."""
    for layer in model._flatten_layers():
        if isinstance(layer, ShardBatchNormalization):
            layer.__class__ = keras.layers.BatchNormalization
        elif isinstance(layer, KerasShardDropout):
            kind = type(layer).__bases__[1]
            layer.__class__ = kind


def shard_norms(model: Any) -> list[ShardBatchNormalization]:
    """The swapped BatchNormalization layers, in the order of the model."""
    return [x for x in model._flatten_layers() if isinstance(x, ShardBatchNormalization)]


def _unlike(layer: Any, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"to train the Keras {type(layer).__name__} {layer.name!r}",
        found=f"{found} in it",
        why=why,
        do=f"use keras.layers.{type(layer).__mro__[1].__name__} without it",
    )


# --- autograph -----------------------------------------------------------------------------------
# A task's own methods as graphs: Python's `if` and `len` in them work on tensors, by AutoGraph.
#
# The engine's own functions are not rewritten by it: that takes a second on every rank, and they
# need none of it. As with `fit`, layers are not either.


METHODS = ("inputs", "loss", "weight", "regularizer", "metrics")


class InGraph:
    """A task whose `METHODS` are called while a graph is made; all else is the task's own."""

    def __init__(self, task: Task) -> None:
        self._task = task
        for name in METHODS:
            setattr(self, name, _rewritten(task, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def _rewritten(task: Task, name: str) -> Callable[..., Any]:
    """A method with AutoGraph's control flow; as it is where its source cannot be read."""
    plain: Callable[..., Any] = getattr(task, name)
    if not task.overrides(name):
        return plain
    try:
        return partial(tf.autograph.to_graph(getattr(type(task), name)), task)
    except (ValueError, TypeError, OSError, NotImplementedError):
        return plain
