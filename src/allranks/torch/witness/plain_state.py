"""Plain state: what a program keeps beside the weights and buffers that torch knows of.

Counters, generators, arrays and tensors among the attributes of modules, of the task, of its data
set, and of the globals of its program. The witness looks at them before and after what should
leave them alone (`read`), and puts them back after passes of its own (`Kept`).
"""

from __future__ import annotations

import hashlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.model.layers import OF_SWAPPED

Roots = list[tuple[str, Any]]
"""What is looked through: the words before the names in it, and the object."""
Token = tuple[str, Any]
"""The kind of a value (`number`, `generator`, `array`, `tensor`),
and what tells two contents apart."""

DEEPEST = 4  # attributes of attributes
MOST_ITEMS = 64  # of a container that is looked into
MOST_BYTES = 1 << 20  # of an array or a tensor
MOST_CELLS = 100_000
NUMBERS = (int, float, np.integer, np.floating)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | OF_SWAPPED
OPAQUE_TYPES = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(torch.optim.Optimizer, torch.dtype, torch.device, str, bytes),
)


def generator_state(value: Any) -> bytes | None:
    """What a random generator would draw next, as bytes; `None` for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        name, keys, *rest = value.get_state(legacy=True)
        return repr((name, rest)).encode() + np.asarray(keys).tobytes()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    return None


def read(roots: Roots) -> dict[str, Token]:
    """The content of every number, generator, and small array or tensor, by name."""
    found: dict[str, Token] = {}
    for name, value in _walk(roots):
        state = generator_state(value)
        if state is not None:
            found[name] = "generator", hashlib.blake2b(state, digest_size=16).hexdigest()
        elif isinstance(value, NUMBERS) and not isinstance(value, bool):
            found[name] = "number", value
        elif isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.dtype != object:
            found[name] = "array", (value.shape, hashlib.blake2b(value.tobytes()).hexdigest())
        elif isinstance(value, Tensor) and value.nbytes <= MOST_BYTES and not value.is_sparse:
            with suppress(RequestError):  # of a strategy that lets nobody read it
                content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                digest = hashlib.blake2b(content.data).hexdigest()
                found[name] = "tensor", (tuple(value.shape), digest)
    return found


def globals_of(task: Any) -> dict[str, Any]:
    """The globals of the program that defines a task; none of a task that comes with allranks."""
    for method in ("loss", "model", "train_data"):
        own: dict[str, Any] = getattr(getattr(type(task), method, None), "__globals__", {})
        if own and not str(own.get("__name__", "")).startswith("allranks."):
            return own
    return {}


def plain_globals(task: Any) -> dict[str, Any]:
    """Those of them that count or draw."""
    return {
        name: value
        for name, value in globals_of(task).items()
        if not name.startswith("__")
        and (isinstance(value, NUMBERS) or generator_state(value) is not None)
    }


def _walk(roots: Roots) -> Iterator[tuple[str, Any]]:
    """Every value below the roots, each object once, containers before what is in them."""
    seen: set[int] = set()
    cells = 0
    waiting = deque((name, root, 0, True) for name, root in roots)
    while waiting and cells < MOST_CELLS:
        name, value, depth, is_root = waiting.popleft()
        cells += 1
        if not is_root:
            yield name, value
        if isinstance(value, (Tensor, np.ndarray)) or generator_state(value) is not None:
            continue
        if (isinstance(value, OPAQUE_TYPES) and not is_root) or depth > DEEPEST:
            continue
        items = _items(value, name)
        if items is None or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend((inner, item, depth + 1, False) for inner, item in items)


def _items(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """What is in a container or an object, with names; `None` for what has no insides."""
    dot = name if not name or name.endswith((".", " ")) else f"{name}."
    if isinstance(value, dict):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"{dot}{key}", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"{dot}{number}", item) for number, item in enumerate(value)]
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return None
    if isinstance(value, nn.Module):
        own = {key: item for key, item in own.items() if key not in MODULE_ATTRIBUTES}
        own.update(value._modules.items())
    return [(f"{dot}{key}", item) for key, item in list(own.items())]


@dataclass(frozen=True)
class Kept:
    """What plain state held at one moment; `put_back` lets it hold that again."""

    undo: tuple[Callable[[], None], ...]

    @classmethod
    def of(cls, roots: Roots, task: Any) -> Kept:
        """Keep what the roots hold now, and the numbers among the globals of the task's program."""
        values = [root for _, root in roots] + [value for _, value in _walk(roots)]
        own = globals_of(task)
        numbers = {n: v for n, v in plain_globals(task).items() if isinstance(v, NUMBERS)}
        undo = [one for value in values if (one := _undo_of(value)) is not None]
        return cls((*undo, lambda: own.update(numbers)))

    def put_back(self) -> None:
        for undo in self.undo:
            undo()


def _undo_of(value: Any) -> Callable[[], None] | None:
    """What gives `value` its content of now back, if it can change in place."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: void(value.set_state(state))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        numbers = bits.state
        return lambda: setattr(bits, "state", numbers)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state(legacy=False)
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.flags.writeable:
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, Tensor) and value.nbytes <= MOST_BYTES and value.is_leaf:
        try:
            tensor = value.detach().clone()
        except RequestError:  # of a strategy that lets nobody read it
            return None
        return lambda: void(value.detach().copy_(tensor))
    return _undo_of_container(value)


def _undo_of_container(value: Any) -> Callable[[], None] | None:
    if isinstance(value, list):
        items = list(value)
        return lambda: value.__setitem__(slice(None), items)
    if isinstance(value, deque):
        return partial(_refill_row, value, list(value))
    if isinstance(value, (dict, set)):
        return _refill(value)
    own = getattr(value, "__dict__", None)
    is_looked_into = isinstance(own, dict) and not isinstance(value, OPAQUE_TYPES)
    return _refill(own) if is_looked_into else None


def _refill(container: Any) -> Callable[[], None]:
    content = container.copy()

    def put_back() -> None:
        if container != content if isinstance(container, set) else _differs(container, content):
            container.clear()
            container.update(content)

    return put_back


def _refill_row(row: deque[Any], content: list[Any]) -> None:
    row.clear()
    row.extend(content)


def _differs(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() != other.keys() or any(one[key] is not other[key] for key in other)


def void(*_: Any) -> None:
    """Nothing, whatever was done to get there."""
