"""The state of a training, in the parts that torch does not name: optimizer, buffers, randomness.

Torch numbers the parameters in the state of an optimizer; here they have their names. So another
rank, another strategy, or another order of parameters can load the state. A state is taken apart
and put together by `allranks.checkpoint.format`; what is torch's of that is at the end.
"""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import allranks.torch.accelerator as accelerator
from allranks.checkpoint import format as tree
from allranks.checkpoint.format import refused
from allranks.errors import RequestError


def copied(state: Any) -> Any:
    """A copy of a state that shares no memory with it; DTensors are copied too."""
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


def not_persistent(model: nn.Module) -> list[str]:
    """The buffers that are not part of the model's state dict: what an export leaves out."""
    persistent = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name not in persistent]


def saved_names(model: nn.Module) -> dict[str, list[str]]:
    """The names in the state dict under which a model saves each parameter and buffer.

    Tied weights have two; buffers that are not persistent have none.
    """
    persistent = model.state_dict().keys()
    first: dict[int, str] = {}
    names_of: dict[str, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names = names_of.setdefault(first.setdefault(id(tensor), name), [])
        if name in persistent and name not in names:
            names.append(name)
    return names_of


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load what `model_state` returned; raises `RequestError` if it is another model's."""
    here = model_state(model)
    _check_same(
        "tensors", {n: _shape(v) for n, v in here.items()}, {n: _shape(v) for n, v in state.items()}
    )
    _check_same(
        "types of number",
        {n: _dtype(v) for n, v in here.items()},
        {n: _dtype(state[n]) for n in here},
    )
    persistent = model.state_dict().keys()
    model.load_state_dict({name: value for name, value in state.items() if name in persistent})
    with torch.no_grad():
        for name in here.keys() - persistent:
            here[name].copy_(state[name])


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the settings of every group of an optimizer, without its parameters."""
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
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], initial: TrainedSet
) -> None:
    """Train what was trained at the checkpoint: groups that were added, weights that were unfrozen.

    `state` holds the set that the task `made`, and the set at the checkpoint, `now`. A weight that
    the task newly creates as frozen, or as trainable, stays as the task creates it. Raises
    `RequestError` if the task's groups differ.
    """
    then, now = TrainedSet(**state["made"]), TrainedSet(**state["now"])
    _check_same("groups of parameters", _sorted(initial.groups), _sorted(then.groups))
    parameters = dict(model.named_parameters())
    free, was_made_free, was_free = set(initial.free), set(then.free), set(now.free)
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
    """Ignore the program's next attempt to add each group from `first` on: it is there already."""
    there = [{id(p) for p in group["params"]} for group in optimizer.param_groups[first:]]
    add = optimizer.add_param_group

    def add_unless_there(group: dict[str, Any]) -> None:
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if {id(p) for p in parameters} in there:
            there.remove({id(p) for p in parameters})
        else:
            add({**group, "params": parameters})

    optimizer.add_param_group = add_unless_there  # type: ignore[assignment, method-assign]


def _sorted(groups: list[list[str]]) -> dict[str, Any]:
    return {str(number): sorted(names) for number, names in enumerate(groups)}


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, initial: list[dict[str, Any]]
) -> dict[str, Any]:
    """The state of an optimizer, with the names of the parameters in place of their numbers.

    `initial` are its hyper-parameters as the task set them, before any step. `shared` is state that
    belongs to no parameter.
    """
    names = _names(model, optimizer)
    plain = optimizer.state_dict()
    groups = [{**g, "params": [names[n] for n in g["params"]]} for g in plain["param_groups"]]
    extras = {n: value for n, value in plain.items() if n not in ("state", "param_groups")}
    return {
        **extras,
        "kind": type(optimizer).__qualname__,
        "state": {names[n]: values for n, values in plain["state"].items() if n in names},
        "shared": {n: values for n, values in plain["state"].items() if n not in names},
        "param_groups": groups,
        "made": initial,
    }


GROUP_KEYS = ("kind", "state", "shared", "param_groups", "made")


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], initial: list[dict[str, Any]]
) -> None:
    """Load what `optimizer_state` returned; raises `RequestError` if it is another optimizer's.

    A hyper-parameter with the same initial value as before continues from its saved value. One
    that the task now sets differently has the new value.
    """
    names = _names(model, optimizer)
    numbers = {name: number for number, name in names.items()}
    groups_here = optimizer.state_dict()["param_groups"]
    _check_same(
        "optimizer", {"its class": type(optimizer).__qualname__}, {"its class": state["kind"]}
    )
    was = {str(i): sorted(group["params"]) for i, group in enumerate(state["param_groups"])}
    now = {str(i): sorted(names[n] for n in group["params"]) for i, group in enumerate(groups_here)}
    _check_same("groups of parameters", now, was)
    groups = []
    rows = zip(groups_here, state["param_groups"], initial, state["made"], strict=True)
    for mine, saved, new, old in rows:
        anew = {n: v for n, v in new.items() if n not in old or not _is_same(v, old[n])}
        groups.append({**saved, **anew, "params": mine["params"]})
    moments = {numbers[name]: values for name, values in state["state"].items()}
    extras = {name: value for name, value in state.items() if name not in GROUP_KEYS}
    state_dict = {**extras, "state": {**moments, **state["shared"]}, "param_groups": groups}
    optimizer.load_state_dict(state_dict)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _undo_casts(model, optimizer, state["state"])


def _undo_casts(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restore values that torch has changed while loading: it casts tensors to the type of their
    parameter, and converts texts and tuples.
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


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))
    return bool(first == second)


def _names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """The name of the parameter behind each number in the optimizer's state."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: name_of[id(parameter)] for number, parameter in enumerate(parameters)}


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, Tensor) else None


def _check_same(kind: str, now: dict[str, Any], was: dict[str, Any]) -> None:
    if now == was:
        return
    name = next(name for name in sorted({**now, **was}) if now.get(name) != was.get(name))
    raise RequestError(
        asked="to resume from a checkpoint",
        found=f"other {kind}: {name} is {now.get(name, 'missing')}, was {was.get(name, 'missing')}",
        why="the state is loaded name by name",
        do="resume with the program as it was, or start anew in another folder",
    )


def random_streams(device: torch.device) -> dict[str, Any]:
    """The states of this rank's generators, which user code may draw from without a key."""
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
    if device.type not in accelerator.NO_ACCELERATORS:
        streams[device.type] = accelerator.rng_state(device)
    return streams


def set_random_streams(streams: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to the states that `random_streams` returned."""
    random.setstate((3, tuple(streams["python"].tolist()), streams["python_gauss"]))
    position, has_gauss, gauss = streams["numpy_position"]
    key = streams["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, gauss))
    torch.set_rng_state(streams["torch"])
    if accelerator.is_accelerator(device) and device.type in streams:
        accelerator.set_rng_state(streams[device.type], device)


@contextmanager
def kept_random_streams(device: torch.device) -> Iterator[None]:
    """Restore all random streams afterwards, whatever is drawn or seeded within."""
    streams = random_streams(device)
    try:
        yield
    finally:
        set_random_streams(streams, device)


# --- tensors -------------------------------------------------------------------------------------
# What a tensor of a state may be, and how the manifest calls its type of number.


DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I32": torch.int32},
    **{"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32},
    **{"F64": torch.float64, "C64": torch.complex64, "C128": torch.complex128},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked by name, because importing the type takes a second."""
    return type(tensor).__module__.startswith("torch.distributed.tensor")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its own memory, not a copy. No communication."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def flatten(state: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors by path; every path begins with `prefix`.

    The tensors are those of the state, not copies; a meta tensor stands for one that another rank
    holds. Raises `RequestError` for what cannot be saved.
    """
    return tree.flatten(state, prefix, _tensor_of)


def _tensor_of(value: Any, path: str) -> Tensor | None:
    return _saveable(value, path) if isinstance(value, Tensor) else None


def _saveable(tensor: Tensor, path: str) -> Tensor:
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        raise refused(path, f"a tensor of {tensor.dtype}, {tensor.layout}")
    if is_dtensor(tensor) and any(place.is_partial() for place in tensor.placements):  # type: ignore[attr-defined]
        raise refused(path, "a DTensor whose sum over the ranks was not taken")
    return tensor.detach().resolve_conj().resolve_neg()


# --- messages ------------------------------------------------------------------------------------
# A state as the body of a message between processes. No pickle is involved.
#
#     | bytes of the text: u64 | text: JSON | tensors, one behind the other |


_LENGTH = struct.Struct("!Q")


def packed(state: Any, prefix: str = "optimizer") -> list[bytes | memoryview]:
    """The body of a message with a state; raises `RequestError` for what cannot be saved."""
    skeleton, tensors = flatten(state, prefix)
    flat = {path: tensor.cpu().contiguous() for path, tensor in tensors.items()}
    rows = [[path, NAMES[t.dtype], list(t.shape)] for path, t in flat.items()]
    text = json.dumps({"state": skeleton, "tensors": rows}).encode()
    return [_LENGTH.pack(len(text)), text, *map(_bytes, flat.values())]


def unpacked(body: memoryview) -> Any:
    """The state in a message; raises `ValueError` or `KeyError` if it is malformed."""
    if len(body) < _LENGTH.size:
        raise ValueError("no state of an optimizer")
    at = _LENGTH.size + _LENGTH.unpack(body[: _LENGTH.size])[0]
    header = json.loads(bytes(body[_LENGTH.size : at]))
    tensors: dict[str, Tensor] = {}
    for path, name, shape in header["tensors"]:
        dtype = DTYPES[name]
        end = at + math.prod(shape) * dtype.itemsize
        if end > len(body):
            raise ValueError(f"the bytes of {path} are missing")
        raw = torch.tensor([], dtype=torch.uint8)
        if end > at:
            raw = torch.frombuffer(body[at:end], dtype=torch.uint8).clone()  # aligned
        tensors[path] = raw.view(dtype).view(shape)
        at = end
    return tree.unflatten(header["state"], tensors)


def _bytes(tensor: Tensor) -> bytes | memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if tensor.numel() else b""
