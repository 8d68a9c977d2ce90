"""Keras layers in the torch engine: they hear of training, and BatchNorm and dropout have shards.

Under `KERAS_BACKEND=torch` a Keras model is an `nn.Module`, but its layers are out of torch's
sight: they do not hear of `train()` and `eval()`, and draw and count by themselves. So the engine
swaps them in place, as it does torch's own (`layers`), and puts them back at the end:

* A layer that torch's code calls says `training` to all below it, as Keras' own `fit` would. A part
  that the model calls with `training=False` stays as it is in evaluation.
* BatchNormalization, Dropout and SpatialDropout belong to shards.
* A model that is Keras' as a whole has its weights by their Keras names, each once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.batchnorm.shard import NormOfShard, normalised
from allranks.torch.keras.setting import KerasSetting
from allranks.torch.model.layers import (
    Normalising,
    OfShard,
    Scope,
    Swapped,
    every_layer,
    full_type,
    own_kind,
    swapped_kind,
)
from allranks.torch.random.dropout import dropped

DROPOUTS = {  # axes beside samples and channels that share one draw
    "Dropout": 0,
    "SpatialDropout1D": 1,
    "SpatialDropout2D": 2,
    "SpatialDropout3D": 3,
}
BATCH_NORM = "BatchNormalization"
FIRST_INDEX = 1 << 20  # the layers of torch are counted from 0


def is_keras(module: nn.Module) -> bool:
    """Whether a module is a layer of Keras, or made of such."""
    return hasattr(module, "_flatten_layers")


def belongs_to_shards(kind: type) -> bool:
    """Whether a class is one of Keras whose layers are swapped for such that belong to shards."""
    known = kind.__name__ in DROPOUTS or kind.__name__ == BATCH_NORM
    return known and kind.__module__.startswith("keras.")


def swap_keras_layers(model: nn.Module, scope: Scope, names: dict[str, list[str]]) -> None:
    """Swap the Keras layers of `model` in place; adds their names to `names`."""
    found: list[Any] = [layer for layer in every_layer(model) if is_keras(layer)]
    for index, layer in enumerate(found, start=FIRST_INDEX):
        kind = own_kind(layer)
        if not belongs_to_shards(kind):
            continue
        is_norm = kind.__name__ == BATCH_NORM
        mixin = ShardKerasBatchNorm if is_norm else ShardKerasDropout
        layer.__class__ = swapped_kind(mixin, kind)
        layer.scope, layer.index = scope, index
        names["batchnorm" if is_norm else "dropout"].append(str(getattr(layer, "name", index)))
    for entry in _entries(model):
        told = ToldModel if entry is model else Told
        below = type(entry) if isinstance(entry, OfShard) else own_kind(entry)
        entry.__class__ = type(_kind_of(entry), (told, below), {})
        entry.scope = scope
    if is_keras(model):
        _check_names(model)


def _entries(module: nn.Module) -> Iterator[Any]:
    """The Keras layers that code of torch calls: below them Keras passes on what they are told."""
    if is_keras(module):
        yield module
        return
    for child in dict.fromkeys(module.children()):
        yield from _entries(child)


class Told(Swapped):
    """A Keras layer that hears of `train()` and `eval()`, and makes tensors where the job says."""

    scope: Scope

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        layer: Any = self
        keywords.setdefault("training", layer.training)
        kind = layer.dtype_policy.variable_dtype
        floatx = "float64" if kind == "float64" else "float32"
        with KerasSetting(str(self.scope.device), floatx).in_force():
            output = super().__call__(*arguments, **keywords)  # type: ignore[misc]
        if "adds_no_loss" not in vars(self):
            _check_losses(layer)
            layer.adds_no_loss = True
        return output


class ToldModel(Told):
    """A model of Keras: its weights go by their paths, without what Keras draws from."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        model: Any = self
        for variable in model.weights:
            yield f"{prefix}.{variable.path}" if prefix else variable.path, variable.value

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """The weights themselves, not copied."""
        return OrderedDict((name, value.detach()) for name, value in self.named_parameters())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        with torch.no_grad():
            for name, value in self.named_parameters():
                value.copy_(state[name])


class ShardKerasDropout(OfShard):
    """Dropout of Keras whose mask belongs to the shard."""

    def call(self, inputs: Tensor, training: bool = False) -> Any:
        layer: Any = self
        if not (training and self.scope.pieces):
            return super().call(inputs, training=training)  # type: ignore[misc]
        return dropped(self.scope, self.index, inputs, layer.rate, self._mask_shape(inputs))

    def _mask_shape(self, inputs: Tensor) -> list[int]:
        shape = list(inputs.shape)
        given = getattr(self, "noise_shape", None)
        if given is not None:
            own = zip(shape[1:], given[1:], strict=True)
            return [shape[0], *(size if wanted is None else wanted for size, wanted in own)]
        first = 2 if getattr(self, "data_format", "") == "channels_first" else 1
        for axis in range(first, first + DROPOUTS[_kind_of(self)]):
            shape[axis] = 1
        return shape


class ShardKerasBatchNorm(NormOfShard):
    """BatchNormalization of Keras over each shard by itself."""

    track_running_stats: ClassVar[bool] = True

    def call(self, inputs: Tensor, training: bool | None = None, mask: Any = None) -> Any:
        layer: Any = self
        if not (training and layer.trainable and self.scope.pieces):
            return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
        if mask is not None:
            raise RequestError(
                asked=f"to train the Keras {BATCH_NORM} {layer.name!r}",
                found="a mask on what goes into it",
                why="its moments would leave samples out by their tokens",
                do="put it where no mask comes, or normalise with LayerNormalization",
            )
        mean, variance = self.running_statistics()
        by = Normalising(
            self.num_features,
            (mean, variance),
            layer.gamma.value if layer.scale else None,
            layer.beta.value if layer.center else None,
            layer.epsilon,
            biased=True,
        )
        full = inputs.to(full_type(inputs.dtype)).movedim(layer.axis, 1)
        output = normalised(self, full, by).movedim(1, layer.axis)
        return output.to(getattr(torch, layer.compute_dtype))

    @property
    def num_features(self) -> int:
        layer: Any = self
        return int(layer.moving_mean.shape[0])

    def running_statistics(self) -> list[Tensor]:
        layer: Any = self
        return [layer.moving_mean.value, layer.moving_variance.value]

    def running_rate(self) -> float:
        layer: Any = self
        return float(1 - layer.momentum)


def _kind_of(layer: Any) -> str:
    return own_kind(layer).__name__


def _check_losses(entry: Any) -> None:
    """Raise where a layer has added a loss in its first call: `fit` alone would take it in."""
    for layer in entry._flatten_layers():
        if getattr(layer, "_losses", ()):
            raise RequestError(
                asked=f"to train the Keras {_kind_of(layer)} {layer.name!r}",
                found="add_loss(…) in its call",
                why="the engine takes losses from the task alone",
                do="return it with the output, and compute it in loss(output, batch)",
            )


def _check_names(model: Any) -> None:
    """Raise where two weights have one name."""
    paths = [variable.path for variable in model.weights]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise RequestError(
            asked=f"to train the Keras {_kind_of(model)} {model.name!r}",
            found=f"two weights of the name {twice[0]!r}",
            why="weights are saved and summed by their names",
            do="give the layers names of their own: keras.layers.Dense(8, name='head')",
        )
