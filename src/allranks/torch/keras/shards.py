"""Keras layers in the torch engine: `training` flags, and BatchNorm and dropout by shard.

Under `KERAS_BACKEND=torch` a Keras model is an `nn.Module`, but torch does not control its layers:
they ignore `train()` and `eval()`, and have their own draws and counts. So the engine swaps them in
place, like torch's own (`layers`), and restores them at the end:

* A layer that torch code calls passes `training` to all layers below, like Keras' own `fit`. A part
  that the model calls with `training=False` stays in evaluation mode.
* BatchNormalization, Dropout and SpatialDropout work by shard.
* A pure Keras model has each weight once, by its Keras name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from allranks.errors import RequestError
from allranks.torch.batchnorm.shard import NormOfShard, normalised
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
from allranks.torch.task import Task

# --- setting -------------------------------------------------------------------------------------
# Keras' settings of a process, changed for one call and then restored.
#
# On torch Keras creates tensors on a device of its choice, a GPU if there is one, and rounds to 32
# bits, whatever the inputs. A job sets both itself. Nothing here imports Keras: the user's
# program did.


TYPES = "keras.src.backend.common.dtypes"
ROUNDED = "BIT64_TO_BIT32_DTYPE"


@dataclass(frozen=True)
class KerasSetting:
    """The `device` of Keras' new tensors, and the type of its numbers."""

    device: str = "cpu"
    floatx: str = "float32"

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within, Keras uses this setting; a policy of mixed precision is not changed."""
        keras: Any = sys.modules["keras"]
        with keras.device(self.device):
            if keras.config.floatx() == self.floatx == "float32":
                yield
                return
            with _of_type(keras, self.floatx):
                yield


@contextmanager
def of_keras_type(floatx: str) -> Iterator[None]:
    """Within, Keras layers of a torch task have this type, if its program uses Keras."""
    keras: Any = sys.modules.get("keras")
    backend = getattr(getattr(keras, "backend", None), "backend", None)
    if floatx == "float32" or backend is None or backend() != "torch":
        yield
        return
    with _of_type(keras, floatx):
        yield


@contextmanager
def _of_type(keras: Any, floatx: str) -> Iterator[None]:
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    rounded: dict[str, str] = getattr(sys.modules.get(TYPES), ROUNDED, {})
    saved = dict(rounded)
    keras.config.set_floatx(floatx)
    if policy.name == before:
        keras.config.set_dtype_policy(floatx)
    try:
        rounded["float64"] = floatx
        if floatx == "float64" != keras.backend.result_type("float64", "float32"):
            raise RequestError(
                asked="--precision fp64 for a Keras task on the torch engine",
                found=f"Keras {keras.__version__}, which rounds what it computes to 32 bits",
                why="it treats torch like JAX here, and this version has no table to change that",
                do="--engine tensorflow, or --precision fp32",
            )
        yield
    finally:
        rounded.clear()
        rounded.update(saved)
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


def check_types(model: Any, floatx: str) -> None:
    """Raise `RequestError` for 32-bit weights in a 64-bit job: their type would alternate."""
    if floatx != "float64":
        return
    for variable in getattr(model, "weights", ()):
        if variable.dtype.startswith("float") and variable.dtype != floatx:
            raise RequestError(
                asked="--precision fp64",
                found=f"the weight {variable.path}, which the model makes as {variable.dtype}",
                why="Keras would compute with it in that type",
                do="leave dtype out of the layers, set no policy of mixed precision, and make "
                "them in model(), with keras imported at the top of the file",
            )


DROPOUTS = {  # how many axes besides samples and channels share one draw
    "Dropout": 0,
    "SpatialDropout1D": 1,
    "SpatialDropout2D": 2,
    "SpatialDropout3D": 3,
}
BATCH_NORM = "BatchNormalization"
FIRST_INDEX = 1 << 20  # the layers of torch are counted from 0


def is_keras(module: nn.Module) -> bool:
    """Whether a module is a Keras layer or model."""
    return hasattr(module, "_flatten_layers")


def belongs_to_shards(kind: type) -> bool:
    """Whether layers of a Keras class are swapped for layers that work by shard."""
    known = kind.__name__ in DROPOUTS or kind.__name__ == BATCH_NORM
    return known and kind.__module__.startswith("keras.")


def swap_keras_layers(model: nn.Module, scope: Scope, names: dict[str, list[str]]) -> None:
    """Swap the Keras layers of `model` in place; add their names to `names`."""
    layers: list[Any] = [layer for layer in every_layer(model) if is_keras(layer)]
    for index, layer in enumerate(layers, start=FIRST_INDEX):
        kind = own_kind(layer)
        if not belongs_to_shards(kind):
            continue
        is_norm = kind.__name__ == BATCH_NORM
        mixin = ShardKerasBatchNorm if is_norm else ShardKerasDropout
        layer.__class__ = swapped_kind(mixin, kind)
        layer.scope, layer.index = scope, index
        names["batchnorm" if is_norm else "dropout"].append(str(getattr(layer, "name", index)))
    for entry in _entries(model):
        adapter = KerasModelAdapter if entry is model else TrainingFlagAdapter
        below = type(entry) if isinstance(entry, OfShard) else own_kind(entry)
        entry.__class__ = type(_kind_of(entry), (adapter, below), {})
        entry.scope = scope
    if is_keras(model):
        _check_names(model)


def _entries(module: nn.Module) -> Iterator[Any]:
    """The Keras layers that torch code calls; Keras passes `training` on to those below."""
    if is_keras(module):
        yield module
        return
    for child in dict.fromkeys(module.children()):
        yield from _entries(child)


class TrainingFlagAdapter(Swapped):
    """A Keras layer which follows `train()` and `eval()`, and uses the job's device."""

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


class KerasModelAdapter(TrainingFlagAdapter):
    """A Keras model: its weights by their paths, without seeds of generators."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        model: Any = self
        for variable in model.weights:
            yield f"{prefix}.{variable.path}" if prefix else variable.path, variable.value

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """The weights, not copied."""
        return OrderedDict((name, value.detach()) for name, value in self.named_parameters())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        with torch.no_grad():
            for name, value in self.named_parameters():
                value.copy_(state[name])


class ShardKerasDropout(OfShard):
    """Keras dropout whose mask depends on the shard."""

    def call(self, inputs: Tensor, training: bool = False) -> Any:
        layer: Any = self
        if not (training and self.scope.pieces):
            return super().call(inputs, training=training)  # type: ignore[misc]
        return dropped(self.scope, self.index, inputs, layer.rate, self._mask_shape(inputs))

    def _mask_shape(self, inputs: Tensor) -> list[int]:
        shape = list(inputs.shape)
        noise_shape = getattr(self, "noise_shape", None)
        if noise_shape is not None:
            pairs = zip(shape[1:], noise_shape[1:], strict=True)
            return [shape[0], *(size if wanted is None else wanted for size, wanted in pairs)]
        first = 2 if getattr(self, "data_format", "") == "channels_first" else 1
        for axis in range(first, first + DROPOUTS[_kind_of(self)]):
            shape[axis] = 1
        return shape


class ShardKerasBatchNorm(NormOfShard):
    """Keras BatchNormalization over each shard separately."""

    track_running_stats: ClassVar[bool] = True

    def call(self, inputs: Tensor, training: bool | None = None, mask: Any = None) -> Any:
        layer: Any = self
        if not (training and layer.trainable and self.scope.pieces):
            return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
        if mask is not None:
            raise RequestError(
                asked=f"to train the Keras {BATCH_NORM} {layer.name!r}",
                found="a mask on its inputs",
                why="its moments would leave out the masked tokens, and the engine counts samples",
                do="put it where there is no mask, or normalise with LayerNormalization",
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
    """Raise `RequestError` if a layer added a loss in its first call: only `fit` uses it."""
    for layer in entry._flatten_layers():
        if getattr(layer, "_losses", ()):
            raise RequestError(
                asked=f"to train the Keras {_kind_of(layer)} {layer.name!r}",
                found="add_loss(…) in its call",
                why="the engine takes losses from the task alone",
                do="return it with the output, and compute it in loss(output, batch)",
            )


def _check_names(model: Any) -> None:
    """Raise `RequestError` if two weights have the same name."""
    paths = [variable.path for variable in model.weights]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise RequestError(
            asked=f"to train the Keras {_kind_of(model)} {model.name!r}",
            found=f"two weights of the name {twice[0]!r}",
            why="weights are saved and summed by their names",
            do="give the layers names of their own: keras.layers.Dense(8, name='head')",
        )


# --- layers --------------------------------------------------------------------------------------
# Checks of Keras models in the torch engine.
#
# The engine replaces most of what Keras does itself. Refused are layers whose random numbers or
# statistics cannot work by shard, and losses which only Keras' own `fit` uses.


ROUND_KERAS = "put it between Keras layers in an nn.Sequential or nn.Module of torch"
RATES = ("rate", "dropout", "recurrent_dropout")


def check_keras(task: Task, model: nn.Module) -> None:
    """Raise `RequestError` for a Keras layer that the engine would not train like Keras.

    Registers all Keras weights in torch: Keras registers only those created early.
    """
    for module in list(model.modules()):
        if not is_keras(module):
            continue
        keras_layer: Any = module
        for layer in keras_layer._flatten_layers():
            difference = _what_differs(layer)
            if difference is not None:
                raise _refused(layer, *difference)
        known = {id(parameter) for parameter in nn.Module.parameters(keras_layer)}
        if any(id(variable.value) not in known for variable in keras_layer.variables):
            keras_layer._track_variables()
        regularized = any(v.regularizer is not None for v in keras_layer.trainable_variables)
        if regularized and not task.overrides("regularizer"):
            why = (
                "the engine takes losses from the task alone, "
                "so these weights would not be regularized"
            )
            raise _refused(module, "regularizers", why, "let regularizer(model) return their sum")


def _what_differs(layer: Any) -> tuple[str, str, str] | None:
    """The problem of a layer: what was found, why, what to do; `None` without a problem."""
    if not layer.built:
        why = "its weights would be made in the first step, after the optimizer"
        return "no weights yet", why, "begin the model with keras.Input(shape), or build(shape) it"
    kind = own_kind(layer)
    if belongs_to_shards(kind):
        return _what_differs_in_shards(layer)
    if any(base.__name__ in (BATCH_NORM, "SpectralNormalization") for base in kind.__mro__):
        why = "each rank would keep statistics of its own"
        return "running statistics", why, f"use keras.layers.{BATCH_NORM} itself"
    if getattr(layer, "_seed_generators", ()) and _draws(layer):
        why = "Keras would draw the same on every rank, whichever samples it has"
        return "random numbers of its own", why, "use keras.layers.Dropout, which belongs to shards"
    inner = getattr(layer, "module", None)
    if kind.__name__ == "TorchModuleWrapper" and isinstance(inner, nn.Module):
        hidden = [m for m in inner.modules() if isinstance(m, (_BatchNorm, _DropoutNd))]
        if hidden:
            found = f"a torch {type(hidden[0]).__name__}"
            return found, "inside a Keras layer the engine does not see it", ROUND_KERAS
    if getattr(layer, "activity_regularizer", None) is not None:
        why = "the engine takes losses from the task alone"
        return "an activity regularizer", why, "compute it in loss(output, batch)"
    return None


def _what_differs_in_shards(layer: Any) -> tuple[str, str, str] | None:
    if getattr(layer, "renorm", False):
        why = "its corrections follow the batch of one rank"
        return "renorm=True", why, "leave it out"
    shape = getattr(layer, "noise_shape", None)
    if shape is not None and shape[0] == 1:
        why = "one mask for all samples would differ between shards"
        return f"noise_shape={tuple(shape)}", why, "write None for the samples"
    return None


def _draws(layer: Any) -> bool:
    """Whether a layer with a generator draws from it: recurrent layers always have one."""
    rates = [getattr(layer, name) for name in RATES if hasattr(layer, name)]
    return not rates or any(rates)


def _refused(layer: Any, found: str, why: str, do: str) -> RequestError:
    name = f"the Keras {own_kind(layer).__name__} {layer.name!r}"
    return RequestError(asked=f"to train {name}", found=f"{found} in it", why=why, do=do)
