"""The state of a training of which ranks hold parts: which of its tensors follow parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allranks.checkpoint.tree import unflatten
from allranks.errors import RequestError
from allranks.torch.checkpoint.tree import DTYPES, NAMES, flatten
from allranks.torch.comm.comm import Comm
from allranks.torch.state import saved_names


def with_parameters(
    state: dict[str, Any],
    model: nn.Module,
    change: Callable[[str, Tensor], Tensor],
    kept_whole: Mapping[str, bool],
) -> dict[str, Any]:
    """A state of a training in which `change(name, tensor)` stands for all that follows parameters.

    Those are the weights, what the optimizer keeps in their shape, and their averages. What it
    keeps for parameters that are `kept_whole` is as it is, or left out where that is not here.
    Raises `RequestError` for a weight that the state dict of the model does not hold by its name.
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

    optimizer = dict(state["optimizer"])
    of_held = {name: state["model"][alias].shape for alias, name in own_name.items()}
    cut = {n: values for n, values in optimizer["state"].items() if n not in kept_whole}
    kept = {n: values for n, values in optimizer["state"].items() if kept_whole.get(n)}
    plain = _kept_otherwise(cut, of_held)
    for name, values in cut.items():
        kept[name] = {
            key: change(name, value)
            if is_tensor_of(value, of_held[name]) and not (key in plain and len(of_held[name]) < 2)
            else value
            for key, value in values.items()
        }
    optimizer["state"] = kept
    found = {**state, "model": changed(state["model"]), "optimizer": optimizer}
    for weights in ("average", "evaluated"):
        if weights in state:
            found[weights] = changed(state[weights])
    return found


def known_to_all(kept: dict[str, Any], own: Iterable[str], comm: Comm) -> dict[str, Any]:
    """What an optimizer keeps, with meta tensors for what others keep of their `own` names.

    Every rank calls this; sends names and shapes (`control`).
    """
    skeleton, tensors = flatten({name: kept[name] for name in own if name in kept}, "kept")
    looks = {path: [NAMES[t.dtype], list(t.shape)] for path, t in tensors.items()}
    found: dict[str, Any] = {}
    for text in comm.gather_texts(json.dumps([skeleton, looks])):
        theirs, looks = json.loads(text)
        metas = {
            path: torch.empty(shape, dtype=DTYPES[kind], device="meta")
            for path, (kind, shape) in looks.items()
        }
        found.update(unflatten(theirs, metas))
    return {**found, **kept}


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
