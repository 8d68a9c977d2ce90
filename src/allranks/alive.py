"""The objects of a type that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import chain, groupby, starmap
from typing import Any


def instances_of(kind: type) -> list[Any]:
    """All instances that the garbage collector tracks.

    `gc.get_objects()` also lists tuples that other threads are building, and `tuple()` raises
    SystemError there while another reference to such a tuple exists. So one call in C, during which
    Python does not switch threads, makes, filters and drops the list: consecutive objects of a type
    are a group, and the empty tuple replaces each group of another type.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # finalizers are Python
    try:
        types = set(map(type, _every()))
        others: dict[type, tuple[()]] = {t: () for t in types if not issubclass(t, kind)}
        empty_or_group: Callable[..., Iterable[Any]] = others.get
        groups = list(chain.from_iterable(starmap(empty_or_group, groupby(_every(), type))))
    finally:
        if was_enabled:
            gc.enable()
    return [instance for instance in groups if issubclass(type(instance), kind)]  # types may be new


def _every() -> Iterable[Any]:
    """All objects, listed when the first is read; a last `None` is left in the iterator."""
    return chain(chain.from_iterable(map(gc.get_objects, (None,))), (None,))
