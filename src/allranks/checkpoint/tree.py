"""A state as JSON and tensors: what is saved comes back with the same keys, types and numbers.

A state is made of dicts (keys: text or whole numbers), lists, tuples, tensors, and of plain values:
bool, int, float, text, None. Anything else would need pickle, and is refused by its path. What a
tensor is, the engine says.

In the JSON, `{"$tensor": path}` stands for a tensor; `$tuple`, `$dict` (keys that are not text, or
begin with `$`) and `$float` (nan, inf) for what JSON cannot say. A path joins keys with `/`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from allranks.checkpoint.manifest import BadCheckpoint
from allranks.errors import RequestError

Tensor = TypeVar("Tensor")


def flatten(
    state: Any, prefix: str, tensor_of: Callable[[Any, str], Tensor | None]
) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors by path; every path begins with `prefix`.

    `tensor_of(value, path)` is the tensor that a value is, as it can be saved, or None if it is
    none. Raises `RequestError` for what cannot be saved.
    """
    apart = _Apart(tensor_of)
    return apart.to_json(state, prefix), apart.tensors


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """The state that `flatten` took apart; raises `BadCheckpoint` for what it never writes."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = next(iter(skeleton), "")
    if not kind.startswith("$"):
        return {key: unflatten(item, tensors) for key, item in skeleton.items()}
    try:
        return _special(kind, skeleton[kind], tensors)
    except (TypeError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"its values cannot be read at {kind}: {error!r}") from None


def _special(kind: str, value: Any, tensors: Mapping[str, Any]) -> Any:
    if kind == "$tensor":
        return tensors[value]
    if kind == "$tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if kind == "$dict":
        return {key: unflatten(item, tensors) for key, item in value}
    if kind == "$float":
        return float(value)
    raise ValueError("no such kind")


@dataclass
class _Apart(Generic[Tensor]):
    """A state while it is taken apart: the tensors found so far."""

    tensor_of: Callable[[Any, str], Tensor | None]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def to_json(self, value: Any, path: str) -> Any:
        tensor = self.tensor_of(value, path)
        if tensor is not None:
            self.tensors[path] = tensor
            return {"$tensor": path}
        if value is None or isinstance(value, (bool, int, str)):
            return _plain(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if type(value) in (list, tuple):
            items = [self.to_json(item, f"{path}/{i}") for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if type(value) in (dict, OrderedDict):
            items = [[_key(k, path), self.to_json(v, below(path, k))] for k, v in value.items()]
            if any(not isinstance(key, str) or key.startswith("$") for key, _ in items):
                return {"$dict": items}
            return dict(items)
        raise refused(path, f"a value of type {type(value).__qualname__}")


def _plain(value: bool | int | str | None) -> bool | int | str | None:
    """A subclass (an enumeration, a number of numpy) becomes the plain value that it equals."""
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else str.__str__(value)


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise refused(path, f"the key {key!r} of type {type(key).__qualname__}")
    return int(key) if isinstance(key, int) else str.__str__(key)


def below(path: str, key: Any) -> str:
    """The path of a member; `~` escapes `/`, `@`, `~` and text that looks like a number."""
    if not isinstance(key, str):
        return f"{path}/{key}"
    written = key.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    return f"{path}/{'~3' if key.lstrip('-').isdecimal() else ''}{written}"


def refused(path: str, found: str) -> RequestError:
    """The error for a member of a state that no checkpoint can hold."""
    return RequestError(
        asked=f"a checkpoint of {path}",
        found=found,
        why="it cannot be checkpointed without pickle, and a pickle can run any program",
        do="keep it in the state as tensors, numbers, text, lists and dicts",
    )
