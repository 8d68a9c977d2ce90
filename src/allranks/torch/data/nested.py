"""Tensors inside tuples, lists and dicts: what data sets yield and what models take and return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with `change` applied to every tensor; anything else is kept as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is tuple:  # most batches are; to ask for a Mapping takes longer
        return tuple([map_tensors(change, item) for item in value])
    if isinstance(value, Mapping):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    return value


def map_arguments(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """As `map_tensors`, for what modules hand to each other: a mapping stays of its own kind."""
    if isinstance(value, MutableMapping) and type(value) is not dict:
        found = copy.copy(value)
        for key, item in value.items():
            found[key] = map_arguments(change, item)
        return found
    if type(value) in (tuple, list):
        return type(value)(map_arguments(change, item) for item in value)
    if type(value) is dict:
        return {key: map_arguments(change, item) for key, item in value.items()}
    return map_tensors(change, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of the structure, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with its tensors taken, in order, from `tensors`."""
    return map_tensors(lambda _: next(tensors), value)


def concatenated(values: list[Any]) -> Any:
    """Structures of tensors joined along dimension 0; `None` for an empty list."""
    if not values:
        return None
    columns = zip(*(tensors_in(value) for value in values), strict=True)
    return replaced(values[0], (torch.cat(column) for column in columns))
