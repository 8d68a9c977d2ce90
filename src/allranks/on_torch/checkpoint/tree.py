"""A state as JSON and tensors: what is saved comes back with the same keys, types and numbers.

A state is made of dicts (keys: text or whole numbers), lists, tuples, tensors, and of plain values:
bool, int, float, text, None. Anything else would need pickle, and is refused by its path.

In the JSON, `{"$tensor": path}` stands for a tensor; `$tuple`, `$dict` (keys that are not text, or
begin with `$`) and `$float` (nan, inf) for what JSON cannot say. A path joins keys with `/`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.manifest import BadCheckpoint

DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I32": torch.int32},
    **{"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32},
    **{"F64": torch.float64, "C64": torch.complex64},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked by name, because importing the type takes a second."""
    return type(tensor).__module__.startswith("torch.distributed.tensor")


def flatten(state: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors by path; every path begins with `prefix`.

    The tensors are those of the state, not copies. Raises `RequestError` for what cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    return _to_json(state, prefix, tensors), tensors


def unflatten(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
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


def _special(kind: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    if kind == "$tensor":
        return tensors[value]
    if kind == "$tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if kind == "$dict":
        return {key: unflatten(item, tensors) for key, item in value}
    if kind == "$float":
        return float(value)
    raise ValueError("no such kind")


def _to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = _saveable(value, path)
        return {"$tensor": path}
    if value is None or isinstance(value, (bool, int, str)):
        return _plain(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if type(value) in (list, tuple):
        items = [_to_json(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict):
        items = [[_key(k, path), _to_json(v, _below(path, k), tensors)] for k, v in value.items()]
        if any(not isinstance(key, str) or key.startswith("$") for key, _ in items):
            return {"$dict": items}
        return dict(items)
    raise _refused(path, f"a value of type {type(value).__qualname__}")


def _plain(value: bool | int | str | None) -> bool | int | str | None:
    """A subclass (an enumeration, a number of numpy) becomes the plain value that it equals."""
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else str.__str__(value)


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise _refused(path, f"the key {key!r} of type {type(key).__qualname__}")
    return int(key) if isinstance(key, int) else str.__str__(key)


def _below(path: str, key: Any) -> str:
    """The path of a member. Text that looks like a number, `/`, `@` and `~` are written with `~`."""
    if not isinstance(key, str):
        return f"{path}/{key}"
    written = key.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    return f"{path}/{'~3' if key.lstrip('-').isdecimal() else ''}{written}"


def _saveable(tensor: Tensor, path: str) -> Tensor:
    if tensor.dtype not in NAMES or tensor.layout != torch.strided or tensor.is_meta:
        what = "without storage" if tensor.is_meta else f"of {tensor.dtype}, {tensor.layout}"
        raise _refused(path, f"a tensor {what}")
    placements: Any = getattr(tensor, "placements", ()) if is_dtensor(tensor) else ()
    if any(place.is_partial() for place in placements):
        raise _refused(path, "a DTensor whose sum over the ranks was not taken")
    return tensor.detach()


def _refused(path: str, found: str) -> RequestError:
    return RequestError(
        asked=f"a checkpoint of {path}",
        found=found,
        why="it cannot be checkpointed without pickle, and a pickle can run any program",
        do="keep it in the state as tensors, numbers, text, lists and dicts",
    )
