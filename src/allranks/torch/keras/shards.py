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
# What Keras keeps for a whole process, put in force for one call and then taken back.
#
# On torch Keras makes tensors on a device of its own choice, a GPU if there is one, and rounds what
# it computes to 32 bits, whatever goes in. A job says both itself. Nothing here imports Keras: the
# user's program did.


TYPES = "keras.src.backend.common.dtypes"
ROUNDED = "BIT64_TO_BIT32_DTYPE"


@dataclass(frozen=True)
class KerasSetting:
    """The `device` on which Keras makes tensors, and the type of its numbers."""

    device: str = "cpu"
    floatx: str = "float32"

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within, Keras does as this says; a policy of mixed precision stays in force."""
        keras: Any = sys.modules["keras"]
        with keras.device(self.device):
            if keras.config.floatx() == self.floatx == "float32":
                yield
                return
            with _of_type(keras, self.floatx):
                yield


@contextmanager
def of_keras_type(floatx: str) -> Iterator[None]:
    """Within, a task of torch makes its Keras layers of this type, if its program has Keras."""
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
    kept = dict(rounded)
    keras.config.set_floatx(floatx)
    if policy.name == before:
        keras.config.set_dtype_policy(floatx)
    try:
        rounded["float64"] = floatx
        if floatx == "float64" != keras.backend.result_type("float64", "float32"):
            raise _rounds(keras)
        yield
    finally:
        rounded.clear()
        rounded.update(kept)
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


def _rounds(keras: Any) -> RequestError:
    return RequestError(
        asked="--precision fp64 for a Keras task on the torch engine",
        found=f"Keras {keras.__version__}, which rounds what it computes to 32 bits",
        why="on torch it does as on JAX, and this version has no table that says otherwise",
        do="--engine tensorflow, or --precision fp32",
    )


def check_types(model: Any, floatx: str) -> None:
    """Raise `RequestError` for weights of 32 bits in a job of 64: they would be both by turns."""
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


# --- layers --------------------------------------------------------------------------------------
# A Keras model in the torch engine: what would go wrong there is refused, by name.
#
# Most of what Keras does by itself the engine takes over (`keras_shards`). What is refused here are
# layers that draw random numbers or count in a way that it cannot give to shards, and losses that
# only Keras' own `fit` takes in.


ROUND_KERAS = "put it between Keras layers in an nn.Sequential or nn.Module of torch"
RATES = ("rate", "dropout", "recurrent_dropout")


def check_keras(task: Task, model: nn.Module) -> None:
    """Raise `RequestError` for a Keras layer that would not be trained as Keras trains it.

    Lets torch see all weights of those that it has: Keras shows it only those made by then.
    """
    for module in list(model.modules()):
        if not is_keras(module):
            continue
        keras_layer: Any = module
        for layer in keras_layer._flatten_layers():
            found = _what_differs(layer)
            if found is not None:
                raise _refused(layer, *found)
        _show_all_weights(keras_layer)
        regularized = any(v.regularizer is not None for v in keras_layer.trainable_variables)
        if regularized and not task.overrides("regularizer"):
            why = (
                "the engine takes losses from the task alone, "
                "so its weights would not be kept small"
            )
            raise _refused(module, "regularizers", why, "let regularizer(model) return their sum")


def _show_all_weights(layer: Any) -> None:
    known = {id(parameter) for parameter in nn.Module.parameters(layer)}
    if any(id(variable.value) not in known for variable in layer.variables):
        layer._track_variables()


def _what_differs(layer: Any) -> tuple[str, str, str] | None:
    """What of one layer goes wrong: what was found, why, what to do; `None` if nothing does."""
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
        why = "one mask for all samples would be the same in no two shards"
        return f"noise_shape={tuple(shape)}", why, "write None for the samples"
    return None


def _draws(layer: Any) -> bool:
    """Whether a layer with a generator draws from it: a recurrent one has it in any case."""
    rates = [getattr(layer, name) for name in RATES if hasattr(layer, name)]
    return not rates or any(rates)


def _refused(layer: Any, found: str, why: str, do: str) -> RequestError:
    name = f"the Keras {own_kind(layer).__name__} {layer.name!r}"
    return RequestError(asked=f"to train {name}", found=f"{found} in it", why=why, do=do)
