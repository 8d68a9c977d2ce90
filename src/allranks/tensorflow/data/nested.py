"""Batches as they are made of arrays: one, a tuple or list of them, a dict by name, or nested.

What derives from a tuple or a dict stays what it is: see `engine.structures`.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from allranks.errors import RequestError
from allranks.training.engine.structures import Structure, Walker

_WALKER = Walker(lambda value: isinstance(value, np.ndarray), objects=False)


def _structure_of(value: Any) -> Structure | None:
    """What a value holds; `None` for an array, and for whatever an array is made of."""
    kind = type(value)
    if is_dataclass(value) and not isinstance(value, type):
        raise _refused(value, "a dataclass", "takes what is in it for constants")
    if isinstance(value, Mapping) and kind is not dict:
        if kind is defaultdict or not issubclass(kind, (dict, UserDict)):
            value = dict(value)  # others are TensorFlow's own, which pretend to be a dict
        elif not _is_made_of_a_dict(value):
            raise _refused(value, "whose class takes no dict", "makes another one of a dict")
    return _WALKER.open(value)


def _is_made_of_a_dict(value: Mapping[Any, Any]) -> bool:
    make: Any = type(value)
    try:
        return list(make(dict(value))) == list(value)
    except Exception:
        return False


def _refused(value: Any, found: str, why: str) -> RequestError:
    return RequestError(
        asked="a batch or an output of the task, for TensorFlow",
        found=f"a {type(value).__module__}.{type(value).__qualname__}, {found}",
        why=f"a function of TensorFlow {why}",
        do="give a tuple, a named tuple or a dict of arrays",
    )


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` of every array in it."""
    structure = _structure_of(value)
    if structure is None:
        return function(value)
    return structure.build([mapped(function, item) for item in structure.items])


def arrays_in(value: Any) -> Iterator[Any]:
    """Every array of a batch, in order."""
    structure = _structure_of(value)
    if structure is None:
        yield value
    else:
        for item in structure.items:
            yield from arrays_in(item)


def joined(function: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """One structure of several alike: `function` of the arrays that stand at the same place."""
    first = _structure_of(values[0])
    if first is None:
        return function(values)
    items = [structure.items for value in values if (structure := _structure_of(value)) is not None]
    return first.build([joined(function, list(column)) for column in zip(*items, strict=True)])
