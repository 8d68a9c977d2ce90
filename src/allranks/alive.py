"""The objects of a type that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import chain, groupby, starmap
from typing import Any


def instances_of(kind: type) -> list[Any]:
    """All that the garbage collector knows of.

    `gc.get_objects()` lists the tuples that other threads are building, too, and `tuple()` raises
    SystemError there as long as somebody refers to such a one. So the list is made, looked through
    and dropped by one call in C, in which Python changes no thread: consecutive objects of a type
    are a group, and in the place of a group of another type comes the empty tuple.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # finalizers are Python
    try:
        types = set(map(type, _every()))
        others: dict[type, tuple[()]] = {one: () for one in types if not issubclass(one, kind)}
        empty_or_group: Callable[..., Iterable[Any]] = others.get
        found = list(chain.from_iterable(starmap(empty_or_group, groupby(_every(), type))))
    finally:
        if was_enabled:
            gc.enable()
    return [one for one in found if issubclass(type(one), kind)]  # no type that is new since


def _every() -> Iterable[Any]:
    """All objects, asked for with the first of them; last is one of no interest, to stay behind."""
    return chain(chain.from_iterable(map(gc.get_objects, (None,))), (None,))
