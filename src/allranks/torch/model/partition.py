"""Assigns the parts of a model to devices: by hand, or as runs of blocks of similar cost.

A `Unit` is moved as a whole: a module that is called, or a parameter that belongs to none of them.
The units, in the order of the model, are cut into as many runs as there are parts, so that the
largest part is as small as possible. Units that share a tied weight are on one device, that of the
first one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.strategies.shards import balanced_ends
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.data.batch import Cutting, MicroBatch
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.collate import copied, map_arguments, tensors_of_arguments
from allranks.torch.data.open_data import open_data
from allranks.torch.model.layers import Moment, Scope
from allranks.torch.model.precision import Precision
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.step.losses import forward
from allranks.torch.step.user_buffers import UserBuffers, put_back
from allranks.torch.task import Task
from allranks.training.progress import Progress

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """What lies on one device as a whole; without a `module` it is a tensor of the root's own."""

    name: str
    module: nn.Module | None
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters and buffers."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class DeviceMap:
    """The units of a model, each with the number of its part."""

    units: tuple[Unit, ...]
    parts: tuple[int, ...]

    def part_of(self, name: str) -> int:
        """The part of a parameter or buffer; the first for an unknown name."""
        for unit, part in zip(self.units, self.parts, strict=True):
            if name == unit.name or name.startswith(f"{unit.name}."):
                return part
        return 0

    @torch.no_grad()
    def place(self, devices: Sequence[torch.device]) -> None:
        """Move every unit to the device of its part. Parameters keep their identity."""
        for unit, part in zip(self.units, self.parts, strict=True):
            if unit.module is not None:
                unit.module.to(devices[part])
                continue
            for tensor in unit.tensors:
                tensor.data = tensor.data.to(devices[part])


def units_of(model: nn.Module, least: int) -> tuple[Unit, ...]:
    """The units of a model in its order, at least so many that are called.

    Members of containers and of `nn.Sequential`s, else the children of the model; the largest is
    cut further as long as there are too few. Raises `RequestError` for one that cannot be cut.
    """
    modules = _cut("", model)
    while len(modules) < least:
        able = [n for n, m in modules.items() if any(True for _ in m.children())]
        if not able:
            raise RequestError(
                asked=f"--strategy model-parallel:parts={least}",
                found=f"{type(model).__name__} is made of {len(modules)} modules",
                why="whole modules are placed on devices, so each part has one at least",
                do=f"parts={max(1, len(modules))}, or write the model as more modules",
            )
        largest = max(able, key=lambda name: _nbytes(modules[name]))
        modules = {
            inner: module
            for name, outer in modules.items()
            for inner, module in (_cut(name, outer) if name == largest else {name: outer}).items()
        }
    return _with_loose(model, modules)


def _cut(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The modules below one, each once; containers and sequences are replaced by their members."""
    modules: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        is_container = isinstance(child, CONTAINERS) or type(child) is nn.Sequential
        modules |= _cut(full, child) if is_container else {full: child}
    return modules


def _with_loose(model: nn.Module, modules: dict[str, nn.Module]) -> tuple[Unit, ...]:
    """The modules as units, and before them each tensor that is in none."""
    units = [Unit(name, m, (*m.parameters(), *m.buffers())) for name, m in modules.items()]
    inside = {id(tensor) for unit in units for tensor in unit.tensors}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    loose = [Unit(name, None, (t,)) for name, t in named.items() if id(t) not in inside]
    return (*loose, *units)


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def balanced(units: tuple[Unit, ...], costs: Sequence[float], parts: int) -> DeviceMap:
    """The map in which the most costly part costs least; tensors of the root are in the first."""
    owners = _owners(units)
    called = [i for i, unit in enumerate(units) if unit.module is not None and owners[i] == i]
    if len(called) < parts:
        raise RequestError(
            asked=f"--strategy model-parallel:parts={parts}",
            found=f"{len(called)} modules that share no weight",
            why="modules with a tied weight are on one device",
            do=f"parts={max(1, len(called))}",
        )
    sums = {i: sum(c for j, c in enumerate(costs) if owners[j] == i) for i in called}
    runs = runs_of([sums[i] for i in called], parts)
    part_of = dict(zip(called, runs, strict=True))
    return DeviceMap(units, tuple(part_of.get(owners[i], 0) for i in range(len(units))))


def _owners(units: tuple[Unit, ...]) -> list[int]:
    """For each unit the first one that shares a tensor with it, or with one that does."""
    owners = list(range(len(units)))
    first: dict[int, int] = {}
    for number, unit in enumerate(units):
        shared = {owners[first[id(t)]] for t in unit.tensors if id(t) in first}
        if shared:
            lowest = min(shared)
            owners = [
                lowest if owner in shared or i == number else owner
                for i, owner in enumerate(owners)
            ]
        for tensor in unit.tensors:
            first.setdefault(id(tensor), number)
    return owners


def runs_of(costs: Sequence[float], parts: int) -> list[int]:
    """The run of each item: none is empty, and the largest is as small as can be."""
    ends = balanced_ends(costs, parts)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [part for part, size in enumerate(sizes) for _ in range(size)]


def by_hand(model: nn.Module, parts_by_name: Mapping[str, int], parts: int) -> DeviceMap:
    """The device map of a task; raises `RequestError` if it is not valid."""
    modules = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named = {name: modules[name] for name in parts_by_name if name in modules}
    _check_names(parts_by_name, modules, tensors, parts)
    loose = _with_loose(model, named)
    missing = [u.name for u in loose if u.module is None and u.name not in parts_by_name]
    if missing:
        raise _wrong(f"nothing for {missing[0]!r}", "every weight is on a device", "name it too")
    numbers = tuple(parts_by_name[unit.name] for unit in loose)
    owners = _owners(loose)
    for unit, owner, part in zip(loose, owners, numbers, strict=True):
        if part != numbers[owner]:
            other = loose[owner].name
            found = f"{other!r} in part {numbers[owner]}, {unit.name!r} in part {part}"
            raise _wrong(found, "they share a weight, which is in one place", "give both one part")
    return DeviceMap(loose, numbers)


def _check_names(
    parts_by_name: Mapping[str, int],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    parts: int,
) -> None:
    for name, part in parts_by_name.items():
        if name not in modules and name not in tensors:
            raise _wrong(f"{name!r}", "the model has nothing of that name", "see named_modules()")
        if type(part) is not int or not 0 <= part < parts:
            found = f"part {part!r} for {name!r}, with parts={parts}"
            raise _wrong(found, "parts are counted from 0", f"a number below {parts}")
        for other in parts_by_name:
            if other != name and (not name or other.startswith(f"{name}.")):
                found = f"{name or 'the whole model'!r} and {other!r}"
                raise _wrong(found, "one lies in the other", "name modules beside each other")
    if unused := set(range(parts)) - set(parts_by_name.values()):
        found = f"nothing in part {min(unused)} of {parts}"
        do = f"--strategy model-parallel:parts={len(set(parts_by_name.values()))}"
        raise _wrong(found, "its device would have nothing to do", do)


def _wrong(found: str, why: str, do: str) -> RequestError:
    return RequestError(asked="device_map(model) of the task", found=found, why=why, do=do)


# --- block costs ---------------------------------------------------------------------------------
# Measures the cost of the blocks of a model: the time of forward and backward of each.
#
# One pass over a few samples of the task's data records the inputs of each block. Then each block
# runs forward and backward by itself, several times, and the quickest counts. Afterwards all state
# is restored: gradients, statistics, and random streams.


REPEATS = 3
Calls = dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]
"""For each block, by its number, what it was called with."""


def seconds_of(
    blocks: Sequence[nn.Module],
    model: nn.Module,
    task: Task,
    scope: Scope,
    precision: Precision,
    option: str,
) -> list[float]:
    """The seconds of forward and backward of each block, for the first shard of the first batch.

    Opens the training data of the task. A block that is not called costs nothing.
    """
    with kept_random_streams(scope.device):
        micro = _first_shard(task, scope.seed, precision, option)
        moment = Moment(0, micro.pieces, micro.samples, {})
        buffers = UserBuffers(model).copies()
        with scope.again(moment), _not_shortening(scope), precision.autocast():
            try:
                calls = _calls(blocks, model, task, copied(micro.data))
                return [
                    sum(_seconds(block, *call) for call in calls[number])
                    for number, block in enumerate(blocks)
                ]
            finally:
                put_back(buffers)


def _first_shard(task: Task, seed: int, precision: Precision, option: str) -> MicroBatch:
    """The first samples of the training, as a step would have them."""
    seed_generators(seed)
    opened = open_data(task.train_data(), task, seed, 0, "train_data")
    batches = GlobalBatches(
        source=opened.source,
        cutting=Cutting(task.shards, rank=0, ranks=1, micro_batch=None, shard_alone=True),
        batch_size=task.batch_size,
        last_batch="keep",
        seed=seed,
        precision=precision,
        prefetch=1,
        order=opened.order,
        shuffles=opened.shuffles,
    )
    try:
        first = next(batches.after(Progress(), 1, 1), None)
    finally:
        batches.close()
    if first is None or not first.micros:
        raise RequestError(
            asked=option,
            found="no sample in the first batch",
            why="what a part of the model costs is measured on samples",
            do="by=size",
        )
    return first.micros[0]


@contextmanager
def _not_shortening(scope: Scope) -> Iterator[None]:
    before, scope.shortens = scope.shortens, False
    try:
        yield
    finally:
        scope.shortens = before


@torch.no_grad()
def _calls(blocks: Sequence[nn.Module], model: nn.Module, task: Task, data: Any) -> Calls:
    """The inputs of each block in one forward pass."""
    calls: Calls = {number: [] for number in range(len(blocks))}

    def noting(number: int) -> Any:
        def note(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls[number].append((args, keywords))

        return note

    hooks = [
        block.register_forward_pre_hook(noting(number), with_kwargs=True)
        for number, block in enumerate(blocks)
    ]
    try:
        forward(task, model, data)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _seconds(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    """The quickest of some passes of one block through forward and backward."""
    return min(_once(block, args, keywords) for _ in range(REPEATS))


@torch.enable_grad()
def _once(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    leaves: list[Tensor] = [p for p in block.parameters() if p.requires_grad]

    def fresh(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaf = tensor.detach().requires_grad_()
        leaves.append(leaf)
        return leaf.clone()  # no leaf: a block may write into what it is given

    positional, named = map_arguments(fresh, args), map_arguments(fresh, keywords)
    _wait(positional)
    start = time.perf_counter()
    output = block(*positional, **named)
    outputs = [tensor for tensor in tensors_of_arguments(output) if tensor.requires_grad]
    if outputs and leaves:
        ones = [torch.ones_like(tensor) for tensor in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
    _wait(output)
    return time.perf_counter() - start


def _wait(value: Any) -> None:
    """Wait until the devices of these tensors are idle."""
    accelerator.synchronize({tensor.device for tensor in tensors_of_arguments(value)})
