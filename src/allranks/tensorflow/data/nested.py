"""Batches as they are made of arrays: one, a tuple or list of them, a dict by name, or nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` of every array in it."""
    if isinstance(value, Mapping):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        made = [mapped(function, item) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return function(value)


def arrays_in(value: Any) -> Iterator[Any]:
    """Every array of a batch, in order."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from arrays_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_in(item)
    else:
        yield value


def joined(function: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """One structure of several alike: `function` of the arrays that stand at the same place."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: joined(function, [value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        made = [joined(function, list(items)) for items in zip(*values, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return function(values)
