"""Tensors in what data sets yield and what models take and return: see `engine.structures`.

`map_tensors`, `tensors_in` and `structure_of` go into batches and outputs, objects of one's own
with them. `map_arguments` and `tensors_of_arguments` go into what modules hand to each other, where
such an object (a cache) may have to stay the same one. `copied` is for all that only watches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils.data import Dataset

from allranks.errors import RequestError
from allranks.training.engine.structures import ATOMS, CODE, Structure, Walker, attributes_of

TORCH_ATOMS = (torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module, Optimizer)
DEEP = 0  # no id of an object


def registered(value: Any) -> Structure | None:
    """The structure of a type that was registered with `torch.utils._pytree`, which has no public
    form; `None` for others, and for one that shows no children."""
    node = getattr(_pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    items = list(children)
    names = [f"[{number}]" for number in range(len(items))]
    return Structure(names, items, lambda new: node.unflatten_fn(new, context)) if items else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


DATA = Walker(_is_tensor, (*TORCH_ATOMS, Dataset), registered)
ARGUMENTS = Walker(_is_tensor, TORCH_ATOMS, objects=False)

structure_of = DATA.open
tensors_of_arguments = ARGUMENTS.arrays_in


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with `change` applied to every tensor; anything else is kept as it is."""
    if type(value) is tuple:  # as most batches are
        return tuple(
            [
                change(item) if isinstance(item, Tensor) else map_tensors(change, item)
                for item in value
            ]
        )
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if type(value) is list:
        return [map_tensors(change, item) for item in value]
    return DATA.map(change, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of the structure, in order."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from tensors_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from tensors_in(item)
    else:
        yield from DATA.arrays_in(value)


def map_arguments(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """As `map_tensors`, for what modules hand to each other."""
    return ARGUMENTS.map(change, value)


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with its tensors taken, in order, from `tensors`."""
    return map_tensors(lambda _: next(tensors), value)


# --- to a device, and to a type ------------------------------------------------------------------


def map_to_device(
    change: Callable[[Tensor], Tensor],
    cast: Callable[[Tensor], Tensor],
    value: Any,
    device: torch.device,
    *,
    pin: bool = False,
) -> Any:
    """As `map_tensors`; an object with a `to` goes to `device` by that, and then is only `cast`.

    It knows which of its tensors stay on the host, as the lengths of a packed sequence do. `pin`
    asks for its `pin_memory` first.
    """
    if type(value) is tuple:  # as most batches are
        items = []
        for item in value:  # a comprehension would have cells for all these arguments
            is_tensor = isinstance(item, Tensor)
            moved = (
                change(item) if is_tensor else map_to_device(change, cast, item, device, pin=pin)
            )
            items.append(moved)
        return tuple(items)
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        changed = {}
        for key, item in value.items():
            is_tensor = isinstance(item, Tensor)
            moved = (
                change(item) if is_tensor else map_to_device(change, cast, item, device, pin=pin)
            )
            changed[key] = moved
        return changed
    return DATA.map(change, value, partial(_moved_and_cast, cast, device, pin))


def _moved_and_cast(
    cast: Callable[[Tensor], Tensor], device: torch.device, pin: bool, value: Any
) -> Any:
    """An object with a `to` on the device; `None` for what has none."""
    if not _moves_itself(value):
        return None
    tensors = list(tensors_in(value))
    if not tensors or any(tensor.device != device for tensor in tensors):
        value = _moved(value, device, pin=pin)
    return DATA.map(cast, value)


def _moves_itself(value: Any) -> bool:
    if isinstance(value, (*ATOMS, *CODE, *TORCH_ATOMS, Mapping)):
        return False
    is_row = isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence)
    return not is_row and callable(getattr(type(value), "to", None))


def _moved(value: Any, device: torch.device, *, pin: bool) -> Any:
    """An object on the device: a shallow copy is moved, as many `to` change the object itself."""
    other: Any = value if isinstance(value, tuple) else copy.copy(value)
    if pin and callable(own := getattr(other, "pin_memory", None)):
        found = own()
        other = other if found is None else found
    try:
        inspect.signature(other.to).bind(device, non_blocking=pin)
    except (TypeError, ValueError):
        found = other.to(device)
    else:
        found = other.to(device, non_blocking=pin)
    return other if found is None else found


# --- copies ---------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """A batch that shares nothing with this one which a model could change.

    Raises `RequestError` for what cannot be copied, or whose copy still shares something.
    """
    memo: dict[int, Any] = {}
    found = _copied(value, memo)
    if memo.pop(DEEP, None):
        before, after = _mutable(value), _mutable(found)
        if shared := before.keys() & after.keys():
            raise _not_copied(before[shared.pop()], "its copy shares it")
    return found


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """As `copy.deepcopy`, which plain structures do not need; `memo[DEEP]` says whether it was."""
    if type(value) is Tensor and not value.__dict__:
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return memo[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_copied(item, memo) for item in value)
    if type(value) is dict:
        return {key: _copied(item, memo) for key, item in value.items()}
    if type(value) in (str, bytes, int, float, bool, type(None)):
        return value
    memo[DEEP] = True
    known = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        for half in memo.keys() - known:
            del memo[half]
        refused = _not_copied(value, f"{type(error).__name__}: {error}")
        if (inside := structure_of(value)) is None:
            raise refused from error
    try:  # its class alone may be in the way, as a dict whose `__init__` wants arguments
        return inside.build([_copied(item, memo) for item in inside.items])
    except RequestError as error:
        raise refused from error


def _mutable(value: Any) -> dict[Any, Any]:
    """What a model could change in a value: memory and objects, by what tells them apart."""
    found: dict[Any, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, np.ndarray):
            if item.size:
                found["array", np.lib.array_utils.byte_bounds(item)[0]] = item
            continue
        if isinstance(item, Tensor):
            if item.layout == torch.strided and item.numel() and not item.is_meta:
                found["memory", item.untyped_storage().data_ptr()] = item
            waiting += vars(item).values()
            continue
        if isinstance(item, (*ATOMS, *CODE, torch.dtype, torch.device, torch.Size)):
            continue
        own = attributes_of(item)
        if id(item) in found:
            continue
        if own or isinstance(item, (list, dict, set, bytearray)):
            found[id(item)] = item
        waiting += own.values()
        if isinstance(item, (tuple, list, set, frozenset)):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
    return found


def _not_copied(value: Any, why: str) -> RequestError:
    kind = type(value)
    return RequestError(
        asked="a copy of a batch",
        found=f"a {kind.__module__}.{kind.__qualname__}: {why}"[:300],
        why="what only looks at a training goes through the model with copies",
        do="let copy.deepcopy copy it",
    )
