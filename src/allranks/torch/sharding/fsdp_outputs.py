"""What a unit returns, shown to `fully_shard` as tensors where it is an object of some class.

Torch looks for tensors in tuples, lists, dicts and dataclasses, and has the weights of a unit
gathered again when the first of their gradients comes. It looks into no other object: weights would
not be there in backward. Here tensors are found in the attributes of such objects, and stand beside
the output while torch looks. Where nothing can be found, the unit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError

DEPTH = 4  # of objects in objects
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type)


class Shown(NamedTuple):
    """An output with what is hidden in it."""

    output: Any
    hidden: list[Tensor]


class Outputs:
    """The hooks around those of torch: one before `fully_shard` is called on a unit, one after."""

    def __init__(self, unit: nn.Module, name: str, asked: str) -> None:
        self.unit, self.name, self.asked = unit, name, asked

    def show(self) -> RemovableHandle:
        """From here on its output is shown with what is hidden in it."""
        return self.unit.register_forward_hook(self._show)

    def give_back(self) -> RemovableHandle:
        """From here on its output is what the unit returned."""
        return self.unit.register_forward_hook(_give_back)

    def _show(self, unit: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) or not torch.is_grad_enabled():
            return None
        objects: list[Any] = []
        seen = list(_seen(output, objects))
        if not objects:
            return None
        hidden = [tensor for one in objects for tensor in _hidden(one, DEPTH, set())]
        if any(tensor.requires_grad for tensor in hidden):
            return Shown(output, hidden)
        trained = any(parameter.requires_grad for parameter in unit.parameters())
        if trained and not any(tensor.requires_grad for tensor in seen):
            raise self._opaque(type(objects[0]).__name__)
        return None

    def _opaque(self, kind: str) -> RequestError:
        return RequestError(
            asked=self.asked,
            found=f"a {kind} from {self.name}, in which no tensor with a gradient can be found",
            why="its weights are gathered again when the gradient of its output comes",
            do="return tensors, in tuples, lists, dicts, dataclasses or attributes of an object; "
            "or let fsdp_units(model) of the task name other blocks",
        )


def _give_back(unit: nn.Module, inputs: Any, output: Any) -> Any:
    return output.output if isinstance(output, Shown) else None


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors in an output as torch finds them, and what is shown beside it."""
    return _seen(output, [])


def _seen(value: Any, objects: list[Any]) -> Iterator[Tensor]:
    """The tensors that torch finds; the `objects` that it does not look into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _seen(item, objects)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _seen(getattr(value, field.name), objects)
    elif not isinstance(value, PLAIN):
        objects.append(value)


def _hidden(value: Any, depth: int, met: set[int]) -> Iterator[Tensor]:
    """The tensors in an object, its attributes and what they hold."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or id(value) in met or isinstance(value, (*PLAIN, nn.Module)):
        return
    met.add(id(value))
    items: list[Any] = list(vars(value).values()) if hasattr(value, "__dict__") else []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    items += [getattr(value, name, None) for name in slots if name != "__dict__"]
    if isinstance(value, Mapping):
        items += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items += value
    for item in items:
        yield from _hidden(item, depth - 1, met)
