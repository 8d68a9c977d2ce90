"""A Keras model in the torch engine: what Keras would do differently there is refused, by name.

Under `KERAS_BACKEND=torch` a Keras model is an `nn.Module`, with its weights as parameters. But its
layers are out of sight of torch: they do not hear of `train()` and `eval()`, keep their own random
numbers and running statistics, and add losses that only Keras' own `fit` takes in.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from allranks.errors import RequestError
from allranks.on_torch.task import Task

WITH_STATE = ("BatchNormalization", "SpectralNormalization")
ROUND_KERAS = "put it between Keras layers in an nn.Sequential or nn.Module of torch"


def check_keras(task: Task, model: nn.Module) -> None:
    """Raise `RequestError` for a Keras layer that would not be trained as Keras trains it."""
    keras: Any = sys.modules.get("keras")
    if keras is None:
        return
    for module in model.modules():
        if not isinstance(module, keras.layers.Layer):
            continue
        for layer in module._flatten_layers():
            found = _what_differs(keras, layer)
            if found is not None:
                raise _refused(layer, *found)
        regularized = any(v.regularizer is not None for v in module.trainable_variables)
        if regularized and not task.overrides("regularizer"):
            why = "the engine takes losses from the task alone, so its weights would not be kept small"
            raise _refused(module, "regularizers", why, "let regularizer(model) return their sum")


def _what_differs(keras: Any, layer: Any) -> tuple[str, str, str] | None:
    """What of one layer goes wrong: what was found, why, what to do; `None` if nothing does."""
    if not layer.built:
        why = "its weights would be made in the first step, after the optimizer"
        return "no weights yet", why, "begin the model with keras.Input(shape), or build(shape) it"
    if type(layer).__name__ in WITH_STATE:
        why = "it would normalise as in evaluation, and each rank would keep statistics of its own"
        return "running statistics", why, f"use torch's nn.BatchNorm2d; {ROUND_KERAS}"
    if getattr(layer, "_seed_generators", ()):
        why = "Keras would draw nothing, as in evaluation, and else the same on every rank"
        return "random numbers of its own", why, f"use torch's nn.Dropout; {ROUND_KERAS}"
    if isinstance(layer, keras.layers.TorchModuleWrapper):
        inner = [m for m in layer.module.modules() if isinstance(m, (_BatchNorm, _DropoutNd))]
        if inner:
            found = f"a torch {type(inner[0]).__name__}"
            return found, "inside a Keras layer the engine does not see it", ROUND_KERAS
    if getattr(layer, "activity_regularizer", None) is not None:
        why = "the engine takes losses from the task alone"
        return "an activity regularizer", why, "compute it in loss(output, batch)"
    is_own = not type(layer).__module__.startswith("keras.")
    if is_own and "training" in inspect.signature(layer.call).parameters:
        why = "Keras tells a layer so in fit() alone; here it would always be False"
        return "call(…, training)", why, "leave `training` out, or write it as an nn.Module"
    return None


def _refused(layer: Any, found: str, why: str, do: str) -> RequestError:
    name = f"the Keras {type(layer).__name__} {layer.name!r}"
    return RequestError(asked=f"to train {name}", found=f"{found} in it", why=why, do=do)
