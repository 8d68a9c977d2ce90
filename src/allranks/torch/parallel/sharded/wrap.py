"""The repeated blocks of a model: what a strategy gathers, uses and lets go of one at a time.

Found on the model: members of an `nn.ModuleList` or `nn.Sequential` that have siblings of their own
class, where these together hold a tenth of the weights (so that no unit is a normalisation). A task
that knows better says so: `fsdp_units(model)`.
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

SHARE = 0.1  # of the weights of the model, that siblings of one class hold together


def units_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """What the task says, or else the blocks that are found: no unit holds another, nor `model`."""
    said = task.fsdp_units(model)
    if said is None:
        return _found(model)
    units = list(dict.fromkeys(said))
    for unit in units:
        _check(unit, units, model)
    return units


def _found(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks that share no weight with the rest of the model."""
    units: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for block in _repeated(model):
        if block not in inside and not _shares(block, model):
            units.append(block)
            inside.update(block.modules())
    return units


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    """From the outside in. A block that is used twice is none: it is gathered with the rest."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        times = Counter(container)
        members = [m for m, count in times.items() if count == 1 and _can_be_called(m)]
        held: Counter[type] = Counter()
        for member in members:
            held[type(member)] += sum(parameter.numel() for parameter in member.parameters())
        classes = Counter(type(member) for member in members)
        for member in members:
            kind = type(member)
            if (
                classes[kind] > 1
                and held[kind] >= SHARE * whole
                and next(member.parameters(), None) is not None
            ):
                yield member


def _can_be_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _shares(block: nn.Module, model: nn.Module) -> bool:
    """Whether a weight of the block stands somewhere else in the model, too."""
    own = {id(parameter) for parameter in block.parameters()}
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    inside = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
    return any(places[one] != inside[one] for one in own)


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
    """Raise `RequestError` for a unit in a block whose sequences are cut: the proof of a block goes
    through it alone, and torch sums the gradients of a unit over the ranks wherever they come."""
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
    """Let every weight lie in one piece of memory, row by row: a transpose does not.

    Products with it are rounded otherwise then: raises `RequestError` where bits are promised.
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
    """Two weights whose numbers may lie in the same memory: an update of one is one of both."""
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
        for (_, last, one), (first, _, other) in pairwise(rows):
            if first <= last:
                return one, other
    return None


def rows_apart(name: str) -> RequestError:
    """What to say of a table whose rows are updated or shortened one by one."""
    return RequestError(
        asked=f"--strategy {name}",
        found="a table whose rows are updated or shortened one by one",
        why="a rank holds some of the rows only",
        do="--strategy ddp, or a dense optimizer and no max_norm",
    )


# --- fsdp outputs --------------------------------------------------------------------------------
# What a unit returns, shown to `fully_shard` as tensors where it is an object of some class.
#
# Torch looks for tensors in tuples, lists, dicts and dataclasses, and has the weights of a unit
# gathered again when the first of their gradients comes. It looks into no other object: weights
# would not be there in backward. Here tensors are found in the attributes of such objects, and
# stand beside the output while torch looks. Where nothing can be found, the unit is refused.


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
