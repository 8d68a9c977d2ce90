"""The state of a training, in the parts that torch does not name: optimizer, buffers, randomness.

Torch numbers the parameters in the state of an optimizer; here they go by their names, so that a
state can be taken up by another rank, another strategy, another order of parameters.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import allranks.torch.accelerator as accelerator
from allranks.catalog import DTENSORS, load
from allranks.errors import RequestError
from allranks.torch.checkpoint.tree import is_dtensor
from allranks.torch.model.reals import reals


def copied(state: Any) -> Any:
    """A state that shares no memory with this one, DTensors too."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(copied(value) for value in state)
    return copy.deepcopy(state)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name, those that are not persistent too."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which ranks may hold parts; those that do all call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def put_whole(target: Tensor, given: Tensor) -> None:
    """Write a whole tensor into `target`: its part of it, if it is a part. No communication."""
    if not is_dtensor(target):
        reals(target).copy_(given)
        return
    held: Any = target
    cut = load(DTENSORS).distribute_tensor
    placed = cut(given, held.device_mesh, held.placements, src_data_rank=None)
    held.to_local().copy_(placed.to_local())


def not_persistent(model: nn.Module) -> list[str]:
    """The buffers that are not part of the model's state dict: what an export leaves out."""
    persistent = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name not in persistent]


def saved_names(model: nn.Module) -> dict[str, list[str]]:
    """By which names of its state dict a model saves each parameter and buffer.

    Tied weights have two; buffers that are not persistent none.
    """
    persistent = model.state_dict().keys()
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names = found.setdefault(first.setdefault(id(tensor), name), [])
        if name in persistent and name not in names:
            names.append(name)
    return found


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Take up what `model_state` returned; raises `RequestError` if it is another model's."""
    own = model_state(model)
    _check_same(
        "tensors", {n: _shape(v) for n, v in own.items()}, {n: _shape(v) for n, v in state.items()}
    )
    _check_same(
        "types of number",
        {n: _dtype(v) for n, v in own.items()},
        {n: _dtype(state[n]) for n in own},
    )
    persistent = model.state_dict().keys()
    model.load_state_dict({name: value for name, value in state.items() if name in persistent})
    with torch.no_grad():
        for name in own.keys() - persistent:
            own[name].copy_(state[name])


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What every group of an optimizer says beside its parameters; no value is shared with it."""
    groups = [{n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups]
    return copy.deepcopy(groups)


@dataclass(frozen=True)
class TrainedSet:
    """The names in each group of the optimizer, and those of trainable weights."""

    groups: list[list[str]]
    free: list[str]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> TrainedSet:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        return TrainedSet(groups, [n for n, p in model.named_parameters() if p.requires_grad])


def load_trained_set(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], made: TrainedSet
) -> None:
    """Train what was trained at the checkpoint: groups that were added, weights that were unfrozen.

    `state` holds what the task `made` then, and what it was `now`. A weight that the task itself
    makes frozen, or free, where it did not before, is as the task makes it. Raises `RequestError`
    if the groups that the task makes are other ones.
    """
    then, now = TrainedSet(**state["made"]), TrainedSet(**state["now"])
    _check_same("groups of parameters", _sorted(made.groups), _sorted(then.groups))
    parameters = dict(model.named_parameters())
    free, was_made_free, was_free = set(made.free), set(then.free), set(now.free)
    for name, parameter in parameters.items():
        if (name in free) == (name in was_made_free):
            parameter.requires_grad_(name in was_free)
    del optimizer.param_groups[len(now.groups) :]
    before = len(optimizer.param_groups)
    for group, names in zip(optimizer.param_groups, now.groups[:before], strict=True):
        group["params"][:] = [parameters[name] for name in names]
    for names in now.groups[before:]:
        optimizer.add_param_group({"params": [parameters[name] for name in names]})
    if len(now.groups) > before:
        _add_once(optimizer, before)


def _add_once(optimizer: Optimizer, first: int) -> None:
    """The groups from `first` on are there: a program that comes to add them again has done so."""
    there = [{id(p) for p in group["params"]} for group in optimizer.param_groups[first:]]
    add = optimizer.add_param_group

    def add_unless_there(group: dict[str, Any]) -> None:
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        if {id(p) for p in given} in there:
            there.remove({id(p) for p in given})
        else:
            add({**group, "params": given})

    optimizer.add_param_group = add_unless_there  # type: ignore[assignment, method-assign]


def _sorted(groups: list[list[str]]) -> dict[str, Any]:
    return {str(number): sorted(names) for number, names in enumerate(groups)}


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, made: list[dict[str, Any]]
) -> dict[str, Any]:
    """The state of an optimizer with the names of the parameters for their numbers.

    `made` are its hyper-parameters as the task made them, before any step. What the optimizer
    keeps for no parameter stands in `shared`.
    """
    names = _names(model, optimizer)
    given = optimizer.state_dict()
    groups = [{**g, "params": [names[n] for n in g["params"]]} for g in given["param_groups"]]
    rest = {name: value for name, value in given.items() if name not in ("state", "param_groups")}
    return {
        **rest,
        "kind": type(optimizer).__qualname__,
        "state": {names[n]: values for n, values in given["state"].items() if n in names},
        "shared": {n: values for n, values in given["state"].items() if n not in names},
        "param_groups": groups,
        "made": made,
    }


GROUP_KEYS = ("kind", "state", "shared", "param_groups", "made")


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], made: list[dict[str, Any]]
) -> None:
    """Take up what `optimizer_state` returned; raises `RequestError` if it is another one's.

    A hyper-parameter that the task makes as it did before goes on from where it was; one that it
    now makes otherwise, because a rate was set anew, is as it is now.
    """
    names = _names(model, optimizer)
    numbers = {name: number for number, name in names.items()}
    own = optimizer.state_dict()["param_groups"]
    _check_same(
        "optimizer", {"its class": type(optimizer).__qualname__}, {"its class": state["kind"]}
    )
    was = {str(i): sorted(group["params"]) for i, group in enumerate(state["param_groups"])}
    now = {str(i): sorted(names[n] for n in group["params"]) for i, group in enumerate(own)}
    _check_same("groups of parameters", now, was)
    groups = []
    for mine, saved, new, old in zip(own, state["param_groups"], made, state["made"], strict=True):
        anew = {n: v for n, v in new.items() if n not in old or not _is_same(v, old[n])}
        groups.append({**saved, **anew, "params": mine["params"]})
    moments = {numbers[name]: values for name, values in state["state"].items()}
    rest = {name: value for name, value in state.items() if name not in GROUP_KEYS}
    given = {**rest, "state": {**moments, **state["shared"]}, "param_groups": groups}
    optimizer.load_state_dict(given)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _undo_casts(model, optimizer, state["state"])


def _undo_casts(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take values as they were saved where torch did not: it rounds what is of another type than
    its parameter, and makes a text or a tuple into something else.
    """
    for name, parameter in model.named_parameters():
        for key, value in saved.get(name, {}).items():
            loaded = optimizer.state[parameter][key]
            if not isinstance(value, Tensor):
                optimizer.state[parameter][key] = _moved(value, parameter.device)
            elif loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """The name of the parameter behind each number in the optimizer's state."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: name_of[id(parameter)] for number, parameter in enumerate(parameters)}


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, Tensor) else None


def _check_same(what: str, now: dict[str, Any], was: dict[str, Any]) -> None:
    if now == was:
        return
    name = next(name for name in sorted({**now, **was}) if now.get(name) != was.get(name))
    raise RequestError(
        asked="to resume from a checkpoint",
        found=f"other {what}: {name} is {now.get(name, 'missing')}, was {was.get(name, 'missing')}",
        why="the state is taken up name by name",
        do="resume with the program as it was, or start anew in another folder",
    )


def random_streams(device: torch.device) -> dict[str, Any]:
    """The generators that user code may draw from outside of what is keyed; this rank's own."""
    python = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    streams = {
        "python": torch.tensor(python[1], dtype=torch.int64),
        "python_gauss": python[2],
        "numpy": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "numpy_position": [
            int(numpy["state"]["pos"]),
            int(numpy["has_gauss"]),
            float(numpy["gauss"]),
        ],
        "torch": torch.get_rng_state(),
    }
    if accelerator.is_accelerator(device):
        streams[device.type] = accelerator.rng_state(device)
    return streams


def set_random_streams(streams: dict[str, Any], device: torch.device) -> None:
    """Let the generators go on where `random_streams` found them."""
    random.setstate((3, tuple(streams["python"].tolist()), streams["python_gauss"]))
    position, has_gauss, gauss = streams["numpy_position"]
    key = streams["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, gauss))
    torch.set_rng_state(streams["torch"])
    if accelerator.is_accelerator(device) and device.type in streams:
        accelerator.set_rng_state(streams[device.type], device)


@contextmanager
def kept_random_streams(device: torch.device) -> Iterator[None]:
    """Within, anything may be drawn or seeded; afterwards the streams go on as if it had not."""
    streams = random_streams(device)
    try:
        yield
    finally:
        set_random_streams(streams, device)
