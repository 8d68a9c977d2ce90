"""The repeated blocks of a model: units that a strategy gathers, uses and frees one at a time.

By default: members of an `nn.ModuleList` or `nn.Sequential` with siblings of the same class, if
these hold at least a tenth of the weights (so that no unit is a normalisation). A task may define
others by `fsdp_units(model)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.torch.keras.shards import is_keras
from allranks.torch.task import Task
from allranks.training.engine.structures import attributes_of

SHARE = 0.1  # of the weights of the model, held by all siblings of one class


def units_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """The units of the task, or else detected ones: no unit contains another, or is `model`."""
    task_units = task.fsdp_units(model)
    if task_units is None:
        return _found(model)
    units = list(dict.fromkeys(task_units))
    for unit in units:
        _check(unit, units, model)
    return units


def _found(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks that share no weight with other modules."""
    units: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for block in _repeated(model):
        if block not in inside and not _shares(block, model):
            units.append(block)
            inside.update(block.modules())
    return units


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Repeated blocks, outermost first. A block that is used twice is not among them."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        times = Counter(container)
        members = [m for m, count in times.items() if count == 1 and _can_be_called(m)]
        numel: Counter[type] = Counter()
        for member in members:
            numel[type(member)] += sum(parameter.numel() for parameter in member.parameters())
        classes = Counter(type(member) for member in members)
        for member in members:
            kind = type(member)
            if (
                classes[kind] > 1
                and numel[kind] >= SHARE * whole
                and next(member.parameters(), None) is not None
            ):
                yield member


def _can_be_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _shares(block: nn.Module, model: nn.Module) -> bool:
    """Whether a weight of the block is also elsewhere in the model."""
    ids = {id(parameter) for parameter in block.parameters()}
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    inside = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
    return any(places[key] != inside[key] for key in ids)


def _check(unit: object, units: list[nn.Module], model: nn.Module) -> None:
    found = ""
    if not isinstance(unit, nn.Module) or unit not in set(model.modules()) - {model}:
        found = f"a {type(unit).__name__} that is no part of the model"
    elif not _can_be_called(unit):
        found = f"a {type(unit).__name__}, which is never called"
    elif any(other in set(unit.modules()) for other in units if other is not unit):
        found = f"a {type(unit).__name__} with another unit in it"
    elif _shares(unit, model):
        found = f"a {type(unit).__name__} that shares a weight with the rest of the model"
    if found:
        raise RequestError(
            asked="fsdp_units(model) of the task",
            found=found,
            why="the weights of a unit are gathered when it is called, and let go of after it",
            do="return modules that are called, each with weights of its own; or do not define it",
        )


def check_units(units: list[nn.Module], blocks: Mapping[str, nn.Module], asked: str) -> None:
    """Raise `RequestError` for a unit inside a block of cut sequences: the first check runs the
    block by itself, and torch would sum the gradients of the unit over the ranks there."""
    for name, block in blocks.items():
        inside = set(block.modules()) - {block}
        if unit := next((unit for unit in units if unit in inside), None):
            raise RequestError(
                asked=asked,
                found=f"a unit in the block {name!r}: a {type(unit).__name__}",
                why="before the first step each block is compared, by itself, with what it is on "
                "a part of the sequence, and its weights have to be there",
                do="let fsdp_units(model) of the task return the blocks, or leave sequence=yes out",
            )


def check_can_be_cut(model: nn.Module, name: str) -> None:
    """Raise `RequestError` for a model whose weights torch's `fully_shard` cannot cut."""
    found, do = "", "--strategy ddp"
    scripted = [path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if any(is_keras(module) for module in model.modules()):
        found = "a Keras model, which keeps its weights in variables of its own"
    elif scripted:
        found = f"a scripted module, {scripted[0]!r}, which takes no hooks and no other weights"
        do = "leave out torch.jit.script and torch.jit.trace, or --strategy ddp"
    elif any(parameter.is_complex() for parameter in model.parameters()):
        found = "complex weights, which torch's fully_shard does not sum"
    elif any(_is_channels_last(parameter) for parameter in model.parameters()):
        found = "weights in the order of --channels-last"
    elif shared := _sharing_memory(model):
        found = f"the weights {shared[0]!r} and {shared[1]!r}, which share memory"
        do = "use one parameter in both places, or --strategy ddp"
    if found:
        raise RequestError(
            asked=f"--strategy {name}",
            found=found,
            why="every weight is cut along its first axis and put together again in each pass",
            do=do,
        )


def make_contiguous(model: nn.Module, asked: str, *, bitwise: bool) -> None:
    """Make every weight contiguous (a transpose is not).

    This changes the rounding of products, so it raises `RequestError` if bits are promised.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_contiguous():
            continue
        if bitwise:
            raise RequestError(
                asked=f"{asked} with equal bits on any ranks",
                found=f"the weight {name!r}, which is not contiguous (a transpose, a slice)",
                why="it is gathered row by row, and products with it are rounded otherwise then",
                do="give the parameter .contiguous() in model()",
            )
        parameter.data = parameter.data.contiguous()


def _is_channels_last(parameter: Tensor) -> bool:
    if parameter.is_contiguous():
        return False
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders.get(parameter.ndim)
    return order is not None and parameter.is_contiguous(memory_format=order)


def _sharing_memory(model: nn.Module) -> tuple[str, str] | None:
    """Two weights whose memory may overlap: an update of one would change both."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            first = int(parameter.storage_offset())
            last = first + sum((int(size) - 1) * int(step) for size, step in steps)
            memory = parameter.untyped_storage()._cdata
            spans.setdefault(memory, []).append((first, last, name))
    for rows in spans.values():
        rows.sort()
        for (_, last, earlier), (first, _, other) in pairwise(rows):
            if first <= last:
                return earlier, other
    return None


def rows_apart(name: str) -> RequestError:
    """The error for a table whose rows are updated or shortened one by one."""
    return RequestError(
        asked=f"--strategy {name}",
        found="a table whose rows are updated or shortened one by one",
        why="a rank holds some of the rows only",
        do="--strategy ddp, or a dense optimizer and no max_norm",
    )


# --- fsdp outputs --------------------------------------------------------------------------------
# The outputs of units, with tensors that `fully_shard` would not find.
#
# Torch looks for tensors in tuples, lists, dicts and dataclasses, and gathers the weights of a unit
# again when the first gradient of these arrives. It looks into no other object, so weights would be
# missing in backward. Here tensors in the attributes of such objects are added to the output while
# torch looks. If there are none, the unit is refused.


DEPTH = 4  # of objects in objects
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type)


class Shown(NamedTuple):
    """An output, and the tensors that are hidden in its objects."""

    output: Any
    hidden: list[Tensor]


class Outputs:
    """Hooks around those of torch: one registered before `fully_shard` of a unit, one after."""

    def __init__(self, unit: nn.Module, name: str, request: str) -> None:
        self.unit, self.name, self.request = unit, name, request

    def show(self) -> RemovableHandle:
        """Register the hook that adds hidden tensors to the output."""
        return self.unit.register_forward_hook(self._show)

    def restore(self) -> RemovableHandle:
        """Register the hook that restores the output."""
        return self.unit.register_forward_hook(_restore)

    def _show(self, unit: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) or not torch.is_grad_enabled():
            return None
        objects: list[Any] = []
        visible = list(_seen(output, objects))
        if not objects:
            return None
        hidden = [tensor for value in objects for tensor in _hidden(value, DEPTH, set())]
        if any(tensor.requires_grad for tensor in hidden):
            return Shown(output, hidden)
        trained = any(parameter.requires_grad for parameter in unit.parameters())
        if trained and not any(tensor.requires_grad for tensor in visible):
            raise self._opaque(type(objects[0]).__name__)
        return None

    def _opaque(self, kind: str) -> RequestError:
        return RequestError(
            asked=self.request,
            found=f"a {kind} from {self.name}, in which no tensor with a gradient can be found",
            why="its weights are gathered again when the gradient of its output comes",
            do="return tensors, in tuples, lists, dicts, dataclasses or attributes of an object; "
            "or let fsdp_units(model) of the task name other blocks",
        )


def _restore(unit: nn.Module, inputs: Any, output: Any) -> Any:
    return output.output if isinstance(output, Shown) else None


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors in an output as torch finds them, with the hidden ones added."""
    return _seen(output, [])


def _seen(value: Any, objects: list[Any]) -> Iterator[Tensor]:
    """The tensors that torch finds; adds others to `objects`."""
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
    """The tensors in an object and, recursively, in its attributes."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or id(value) in met or isinstance(value, (*PLAIN, nn.Module)):
        return
    met.add(id(value))
    items = list(attributes_of(value).values())
    if isinstance(value, Mapping):
        items += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items += value
    for item in items:
        yield from _hidden(item, depth - 1, met)
