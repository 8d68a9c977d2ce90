"""Traverses the structure of a batch or an output, and rebuilds it with the same types.

    tuples, named tuples, lists, deques             by position
    dicts and what derives from them, UserDict      by key, and by the attributes that they have
    dataclasses                                     by attribute
    other objects, where an array is in them        by attribute

An engine defines what an array is. A rebuild calls no code of the user: no `__init__`, no
`__setattr__`, no `__setitem__`; only `__copy__`, if a class defines it.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from allranks.errors import RequestError

Build = Callable[[list[Any]], Any]
ATOMS = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, type, Enum)
CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class Structure(NamedTuple):
    """What a value holds: `names` say where each item stands (`[0]`, `['x']`, `.x`), and `build`
    makes the same of other items."""

    names: list[str]
    items: list[Any]
    build: Build


@dataclass(frozen=True)
class Walker:
    """Goes into structures of arrays.

    `atoms` have nothing inside. `registered` is asked for the structure of other objects first;
    without `objects` those are not gone into, only dataclasses.
    """

    is_array: Callable[[Any], bool]
    atoms: tuple[type, ...] = ()
    registered: Callable[[Any], Structure | None] = lambda value: None
    objects: bool = True

    def map(
        self,
        change: Callable[[Any], Any],
        value: Any,
        replace: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The same structure with `change` of every array; anything else is kept as it is.

        `replace` may give what is no plain container another value (`None`: it does not).
        """
        if self.is_array(value):
            return change(value)
        kind = type(value)
        if kind is tuple:  # most batches are
            return tuple([self.map(change, item, replace) for item in value])
        if kind is dict:
            return {key: self.map(change, item, replace) for key, item in value.items()}
        if kind is list:
            return [self.map(change, item, replace) for item in value]
        if isinstance(value, ATOMS):
            return value
        if replace is not None and (other := replace(value)) is not None:
            return other
        structure = self.open(value)
        if structure is None:
            return value
        items = [self.map(change, item, replace) for item in structure.items]
        is_object = not isinstance(value, (tuple, list, Mapping))
        if is_object and all(new is old for new, old in zip(items, structure.items, strict=True)):
            return value
        return structure.build(items)

    def arrays_in(self, value: Any) -> Iterator[Any]:
        """Every array, in order."""
        if self.is_array(value):
            yield value
        elif type(value) in (tuple, list):
            for item in value:
                yield from self.arrays_in(item)
        elif (structure := self.open(value)) is not None:
            for item in structure.items:
                yield from self.arrays_in(item)

    def open(self, value: Any) -> Structure | None:
        """What a value holds; `None` for an array, and for what has nothing inside."""
        if self.is_array(value) or isinstance(value, ATOMS):
            return None
        if isinstance(value, (tuple, list, deque)):
            return _row(value)
        if isinstance(value, dict):
            return self._with_attributes(value, dict(value.items()))
        if type(value) is MappingProxyType:
            return _by_key(value, MappingProxyType)
        if isinstance(value, UserDict) and type(vars(value).get("data")) is dict:
            return self._with_attributes(value, vars(value)["data"])
        if isinstance(value, (*CODE, *self.atoms)):
            return None
        if isinstance(value, Mapping) and not attributes_of(value):
            return _by_key(value, type(value))
        if self.objects and (structure := self.registered(value)) is not None:
            return structure
        if is_dataclass(value) or isinstance(value, Mapping):
            return _object(value)
        if isinstance(value, (set, frozenset)):
            if any(self._holds(item, []) for item in value):
                raise cannot_open(value, "whose items have no order")
            return None
        if self.objects and self._holds(value, []):
            return _object(value)
        return None

    def _with_attributes(self, value: Any, entries: dict[Any, Any]) -> Structure:
        """A mapping with what is in it, and those of its attributes that hold an array.

        An attribute that is one of the entries, as in an output of transformers, stays that.
        """
        keys, items = list(entries), list(entries.values())
        names = [f"[{key!r}]" for key in keys]
        if type(value) is dict:
            return Structure(names, items, lambda new: dict(zip(keys, new, strict=True)))
        places = {id(item): number for number, item in enumerate(items)}
        same: dict[str, int] = {}
        for name, item in attributes_of(value).items():
            if isinstance(value, UserDict) and name == "data":
                continue
            if isinstance(item, ATOMS):
                continue
            if id(item) in places:
                same[name] = places[id(item)]
            elif self._holds(item, [id(value)]):
                same[name] = len(items)
                items.append(item)
                names.append(f".{name}")

        def build(new: list[Any]) -> Any:
            built = dict(zip(keys, new, strict=False))
            other = _bare(value)
            if isinstance(value, UserDict):
                _put(other, {**attributes_of(value), "data": built})
            else:
                base = OrderedDict if isinstance(value, OrderedDict) else dict
                for key, item in built.items():
                    base.__setitem__(other, key, item)
                _put(other, attributes_of(value))
            _put(other, {name: new[number] for name, number in same.items()})
            return other

        return Structure(names, items, build)

    def _holds(self, value: Any, path: list[int]) -> bool:
        """Whether an array is in a value; raises `RequestError` for one in an object that holds
        itself."""
        if self.is_array(value):
            return True
        if isinstance(value, (*ATOMS, *CODE, *self.atoms)):
            return False
        if id(value) in path:
            return False
        if isinstance(value, (tuple, list, deque, set, frozenset)):
            inner: Any = value
        else:
            inner = [*value.values()] if isinstance(value, Mapping) else []
            inner += attributes_of(value).values()
        path = [*path, id(value)]
        holds = any(self._holds(item, path) for item in inner)
        if holds and any(id(item) in path for item in inner):
            raise cannot_open(value, "which holds itself")
        return holds


def _by_key(value: Mapping[Any, Any], make: Callable[[dict[Any, Any]], Any]) -> Structure:
    keys = list(value)
    return Structure(
        [f"[{key!r}]" for key in keys],
        [value[key] for key in keys],
        lambda items: make(dict(zip(keys, items, strict=True))),
    )


def _row(value: Any) -> Structure:
    names = [f"[{number}]" for number in range(len(value))]
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = [f".{name}" for name in value._fields]

    def build(items: list[Any]) -> Any:
        if kind in (tuple, list):
            return kind(items)
        if isinstance(value, tuple):
            if hasattr(kind, "n_sequence_fields"):  # one of torch.return_types
                return kind(items)
            other = tuple.__new__(kind, items)
        elif isinstance(value, list):
            other = list.__new__(kind)
            list.extend(other, items)
        elif kind is deque:
            return deque(items, value.maxlen)
        else:
            other = copy.copy(value)
            other.clear()
            other.extend(items)
        _put(other, attributes_of(value))
        return other

    return Structure(names, list(value), build)


def _object(value: Any) -> Structure:
    attributes = attributes_of(value)

    def build(items: list[Any]) -> Any:
        if any(isinstance(item, weakref.ReferenceType) for item in attributes.values()):
            raise cannot_open(value, "which has a weak reference")
        other = _bare(value)
        _put(other, dict(zip(attributes, items, strict=True)))
        return other

    return Structure([f".{name}" for name in attributes], list(attributes.values()), build)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has itself, in its `__dict__` and its slots."""
    dictionary = getattr(value, "__dict__", None)
    attributes = dict(dictionary) if isinstance(dictionary, dict) else {}
    for name, slot in _slots(type(value)).items():
        try:
            attributes[name] = slot.__get__(value)
        except AttributeError:
            continue  # it is not set
    return attributes


def _slots(kind: type) -> dict[str, Any]:
    slots: dict[str, Any] = {}
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_private = name.startswith("__") and not name.endswith("__")
            full = f"_{base.__name__.lstrip('_')}{name}" if is_private else name
            slot = base.__dict__.get(full)
            if hasattr(slot, "__set__") and name not in ("__dict__", "__weakref__"):
                slots.setdefault(full, slot)
    return slots


def _put(other: Any, attributes: dict[str, Any]) -> None:
    """Set attributes, of a frozen class as well."""
    slots = _slots(type(other))
    for name, item in attributes.items():
        if name in slots:
            slots[name].__set__(other, item)
        else:
            other.__dict__[name] = item


def _bare(value: Any) -> Any:
    """An object of the same class without content, or a shallow copy by its own `__copy__`."""
    kind = type(value)
    if hasattr(kind, "__copy__") and not isinstance(value, (dict, UserDict)):
        if (other := copy.copy(value)) is not value:
            return other
        raise cannot_open(value, "whose __copy__ returns itself")
    try:
        if isinstance(value, OrderedDict):
            return OrderedDict.__new__(kind)
        if isinstance(value, defaultdict):
            empty = defaultdict.__new__(kind)
            empty.default_factory = value.default_factory
            return empty
        return dict.__new__(kind) if isinstance(value, dict) else object.__new__(kind)
    except TypeError as error:
        raise cannot_open(value, f"of which no other can be made: {error}") from error


def cannot_open(value: Any, found: str) -> RequestError:
    """The error for an object with arrays that cannot be rebuilt with other ones."""
    kind = type(value)
    return RequestError(
        asked="a batch or an output of the task",
        found=f"a {kind.__module__}.{kind.__qualname__} with tensors in it, {found}",
        why="its tensors are cast, moved and cut, and then the same object is made with them",
        do="give tensors in tuples, lists, dicts, dataclasses or attributes of an object",
    )
