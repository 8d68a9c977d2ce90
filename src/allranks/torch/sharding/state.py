"""The state of a training of which ranks hold parts: which of its tensors follow parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.state import saved_names


def with_parameters(
    state: dict[str, Any], model: nn.Module, change: Callable[[str, Tensor], Tensor]
) -> dict[str, Any]:
    """A state of a training in which `change(name, tensor)` stands for all that follows parameters.

    Those are the weights, what the optimizer keeps in their shape, and their averages. Raises
    `RequestError` for a weight that the state dict of the model does not hold by its name.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    own_name = {alias: own for own, names in saved_names(model).items() for alias in names}
    if missing := sorted(shapes.keys() - set(own_name.values())):
        raise RequestError(
            asked="a checkpoint of weights that ranks hold parts of",
            found=f"{missing[0]!r}, which stands in no state dict under that name",
            why="nobody could tell which weight of a checkpoint is which",
            do="take the wrapper that renames it off, or --strategy ddp",
        )

    def changed(named: dict[str, Any]) -> dict[str, Any]:
        return {
            n: change(own_name[n], t) if own_name.get(n) in shapes else t for n, t in named.items()
        }

    optimizer, kept = dict(state["optimizer"]), {}
    of_held = {name: state["model"][alias].shape for alias, name in own_name.items()}
    plain = _kept_otherwise(optimizer["state"], of_held)
    for name, values in optimizer["state"].items():
        kept[name] = {
            key: change(name, value)
            if is_tensor_of(value, of_held[name]) and not (key in plain and len(of_held[name]) < 2)
            else value
            for key, value in values.items()
        }
    optimizer["state"] = kept
    found = {**state, "model": changed(state["model"]), "optimizer": optimizer}
    if "average" in state:
        found["average"] = changed(state["average"])
    return found


def _kept_otherwise(kept: dict[str, Any], shapes: dict[str, torch.Size]) -> set[str]:
    """What an optimizer keeps in another shape than that of matrices, by its name.

    A rank may hold one number of a vector, in the shape of a counter: only matrices can tell.
    """
    return {
        key
        for name, values in kept.items()
        for key, value in values.items()
        if len(shapes[name]) > 1 and not is_tensor_of(value, shapes[name])
    }


def is_tensor_of(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape
