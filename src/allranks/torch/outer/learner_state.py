"""The state of one learner among others: plain tensors, whatever its ranks hold parts of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allranks.catalog import DTENSORS, load
from allranks.torch.checkpoint.tree import is_dtensor, local


def as_parts(state: Any) -> Any:
    """A state in which what this rank holds of a tensor stands for the tensor."""
    if isinstance(state, Tensor):
        return local(state)
    if isinstance(state, dict):
        return {name: as_parts(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(as_parts(value) for value in state)
    return state


def as_it_was(parts: Any, like: Any) -> Any:
    """What `as_parts` was given, of which `like` has the structure. No communication."""
    if isinstance(parts, Tensor):
        if not (isinstance(like, Tensor) and is_dtensor(like)):
            return parts
        placed: Any = like
        return load(DTENSORS).dtensor(parts, placed.device_mesh, placed.placements, placed)
    if isinstance(parts, dict):
        named = like if isinstance(like, dict) else {}
        return {name: as_it_was(value, named.get(name)) for name, value in parts.items()}
    if type(parts) in (list, tuple):
        is_alike = type(like) is type(parts) and len(like) == len(parts)
        others: Any = like if is_alike else [None] * len(parts)
        return type(parts)(as_it_was(*pair) for pair in zip(parts, others, strict=True))
    return parts
