"""A Keras model in the torch engine: what would go wrong there is refused, by name.

Most of what Keras does by itself the engine takes over (`keras_shards`). What is refused here are
layers that draw random numbers or count in a way that it cannot give to shards, and losses that
only Keras' own `fit` takes in.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from allranks.errors import RequestError
from allranks.torch.keras.shards import BATCH_NORM, belongs_to_shards, is_keras
from allranks.torch.model.layers import own_kind
from allranks.torch.task import Task

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
