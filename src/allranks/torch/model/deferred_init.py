"""Models that no process may hold whole at once: built in turn, or on the meta device.

`model()` of a task returns a model with tensors on the meta device if it is too large for one
process. It gets memory, and is filled module by module. Tensors that `pretrained()` names are read;
`init(module)` of the task draws the others, whole, one module at a time. Draws depend only on the
seed of the job and the position of the module. So a process skips modules of which it keeps
nothing, and all strategies start with the same bits.

Other models are built by one rank of a node at a time, which keeps its part before the next one
begins. So the host has at most one whole model and the parts of all ranks. Ranks of other nodes
build at the same time. The turn is a lock of the kernel, which is released with its process: no
rank waits for a dead one, and nothing is left behind.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from allranks.errors import RequestError
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.launcher.processes.linux import control_groups
from allranks.launcher.world import World, master_endpoint
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.comm.comm import in_exchange
from allranks.torch.model.reals import TensorFolder
from allranks.torch.model.weights import digest_of
from allranks.torch.random.keyed_rng import seed_generators
from allranks.training.order import random_key

CPU = torch.device("cpu")
FIRST_WEIGHTS = -2  # the purpose of a random key

Place = Callable[[str, Tensor, Tensor], None]
"""`place(name, target, whole)` copies this rank's part of the whole tensor into `target`."""


@dataclass(frozen=True)
class MetaModule:
    """A module as `model()` returned it, with copies of its tensors that are not on meta.

    `names` are the names of its tensors on meta in the model, by attribute.
    """

    name: str
    index: int
    module: nn.Module
    kind: type[nn.Module]
    names: Mapping[str, str]
    parameters: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]


class MetaModel:
    """The modules of `model` with tensors on meta, and the shapes and types of these, whole."""

    def __init__(self, model: nn.Module) -> None:
        self.like: dict[str, Tensor] = {}
        self.aliases: dict[str, list[str]] = {}
        self.modules: list[MetaModule] = []
        first: dict[int, str] = {}
        for name, tensor in _named(model, remove_duplicate=False):
            if tensor.is_meta:
                name_of_first = first.setdefault(id(tensor), name)
                self.like.setdefault(name_of_first, torch.empty_like(tensor, requires_grad=False))
                self.aliases.setdefault(name_of_first, []).append(name)
        for index, (name, module) in enumerate(model.named_modules()):
            tensors = {**module._parameters, **module._buffers}
            names = {a: first[id(t)] for a, t in tensors.items() if t is not None and t.is_meta}
            if names:
                entry = MetaModule(
                    name=name,
                    index=index,
                    module=module,
                    kind=type(module),
                    names=names,
                    parameters=_copied(module._parameters),
                    buffers=_copied(module._buffers),
                )
                self.modules.append(entry)

    def fill(
        self,
        model: nn.Module,
        pretrained: Mapping[str, Tensor],
        init: Callable[[nn.Module], None],
        place: Place,
        *,
        seed: int,
        device: torch.device,
        is_local: Callable[[str], bool] | None = None,
    ) -> dict[str, str]:
        """Allocate the tensors on `device` and fill them; returns the digest of each, whole.

        With `is_local` it says which ones; others stay on meta, and digests are those of files.
        No communication. At most the tensors of one module, and those it shares with others, are
        whole at a time, twice: `init` runs on zeros and on ones, and numbers that differ afterwards
        were not set. Restores the states of the generators.
        """
        if not self.modules:
            return {}
        give_memory(model, device, is_local)
        targets = dict(_named(model))
        last = {name: entry.index for entry in self.modules for name in entry.names.values()}
        sources = {n: s for n in self.like if (s := self._source(n, pretrained)) is not None}
        needed = {n for n, like in self.like.items() if targets[n].numel() or not like.numel()}
        needed = {name for name in needed if is_local is None or is_local(name)}
        digests: dict[str, str] = {}
        if isinstance(pretrained, TensorFolder):
            digests = {name: pretrained.digest(source) for name, source in sources.items()}
        wholes: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        with torch.no_grad(), kept_random_streams(device):
            for entry in self.modules:
                names = needed.intersection(entry.names.values())
                if names - sources.keys():
                    for number, drawn in enumerate((wholes, others)):
                        seed_generators(random_key(seed, entry.index, FIRST_WEIGHTS))
                        self._draw(entry, drawn, init, number)
                for name in dict.fromkeys(entry.names.values()):
                    if last[name] != entry.index:
                        continue
                    whole, source = wholes.pop(name, None), sources.get(name)
                    other = others.pop(name, None)
                    if name not in needed:
                        continue
                    if source is not None:
                        whole = pretrained[source]
                    elif whole is None or other is None or not same_bytes(whole, other):
                        raise _left_unset(entry, name)
                    if name not in digests and is_local is None:
                        digests[name] = digest_of(whole)
                    place(name, targets[name], whole.to(targets[name].device))
        return digests

    def _source(self, name: str, pretrained: Collection[str]) -> str | None:
        """The name in `pretrained` of a tensor of the model; a tied one has several."""
        return next((alias for alias in self.aliases[name] if alias in pretrained), None)

    def _draw(
        self,
        entry: MetaModule,
        wholes: dict[str, Tensor],
        init: Callable[[nn.Module], None],
        number: int,
    ) -> None:
        """Call `init` on a module in its original class, with whole tensors.

        They are filled with `number` before.
        """
        for name in entry.names.values():
            if name not in wholes:
                wholes[name] = torch.full_like(self.like[name], number, device=CPU)

        def whole(attribute: str, tensor: Tensor | None) -> Tensor | None:
            return wholes[entry.names[attribute]] if attribute in entry.names else tensor

        parameters: dict[str, Any] = {a: whole(a, p) for a, p in entry.parameters.items()}
        for attribute, like in entry.parameters.items():
            if like is not None:
                parameter = nn.Parameter(parameters[attribute], requires_grad=like.requires_grad)
                parameters[attribute] = parameter
        buffers: dict[str, Any] = {a: whole(a, b) for a, b in entry.buffers.items()}
        module: Any = entry.module
        kind, module.__class__ = module.__class__, entry.kind
        before = {name: vars(module)[name] for name in ("_parameters", "_buffers")}
        vars(module).update(_parameters=parameters, _buffers=buffers)
        try:
            init(module)
        finally:
            module.__class__ = kind
            vars(module).update(before)
        for attribute, name in entry.names.items():
            wholes[name] = (parameters | buffers)[attribute].detach()


def give_memory(
    model: nn.Module, device: torch.device, is_local: Callable[[str], bool] | None = None
) -> None:
    """Allocate every meta tensor of the model on `device`, uninitialised; or those it says.

    Like `nn.Module.to_empty`, but tied weights stay tied, and references to a tensor stay valid.
    """
    for name, tensor in _named(model):
        if tensor.is_meta and (is_local is None or is_local(name)):
            exchange(tensor, torch.empty_like(tensor, device=device, requires_grad=False))


def move(model: nn.Module, device: torch.device) -> None:
    """Move tensors on other devices to `device`, as new tensors; meta tensors stay on meta."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, whose id is used no more
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for attribute, tensor in list(tensors.items()):
                if tensor is None or tensor.is_meta or tensor.device.type == device.type:
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(device)
                    if isinstance(tensor, nn.Parameter):
                        there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                    vars(there).update(vars(tensor))
                    moved[id(tensor)] = tensor, there
                tensors[attribute] = moved[id(tensor)][1]  # type: ignore[assignment]


def exchange(tensor: Tensor, real: Tensor) -> None:
    """Make the Python object `tensor` the tensor `real`; references to it stay valid."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(real).update(vars(tensor))
    if type(tensor) is type(real) and type(tensor) in (Tensor, nn.Parameter):
        # as `torch.utils.swap_tensors`, which forbids views of a tensor: they own a part of it
        torch._C._swap_tensor_impl(tensor, real)
    else:  # a DTensor has more to swap
        torch.utils.swap_tensors(tensor, real)


def same_bytes(whole: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type have the same bytes; NaN equals itself."""
    flat, other_flat = (t.detach().contiguous().reshape(-1) for t in (whole, other))
    return torch.equal(flat.view(torch.uint8), other_flat.view(torch.uint8))


def _copied(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        a: t.detach().clone().requires_grad_(t.requires_grad) if t is not None else None
        for a, t in tensors.items()
    }


def _named(model: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, Tensor]]:
    parameters = model.named_parameters(remove_duplicate=remove_duplicate)
    return [*parameters, *model.named_buffers(remove_duplicate=remove_duplicate)]


def _left_unset(entry: MetaModule, name: str) -> RequestError:
    return RequestError(
        asked=f"init(module) of the task for {entry.name!r}, a {entry.kind.__name__} on meta",
        found=f"numbers of {name!r} that it did not set, or that a second call set to other values",
        why="a tensor on the meta device has no numbers of its own",
        do=f"set all of {name!r} in init(module), or name it in pretrained()",
    )


SOONEST_S, LATEST_S = 0.0005, 0.05  # between two attempts to take the lock
FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Files of a control group, by controller ("" in version 2): its limit and its usage."""
CACHE = ("inactive_file", "active_file")
GIB = 2**30
LOOK_EVERY_BYTES = 2**26

_locks: set[socket.socket] = set()


def _close_in_child() -> None:
    """A child process that outlives the turn must not keep the lock."""
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def build_turn(world: World, heartbeat: Heartbeat | SaveThreadHeartbeat | None) -> Iterator[None]:
    """Within, no other rank of this job on this node has its turn.

    Code within must not wait for other ranks. The lock is the name of a socket without
    connections, in Linux's abstract name space, of which each simulated node has its own.
    """
    job = world.store or world.rendezvous or world.secret or master_endpoint()
    key = hashlib.sha256(f"{os.getuid()} {job} {world.node} {world.attempt}".encode()).hexdigest()
    with socket.socket(socket.AF_UNIX) as lock:
        with in_exchange(heartbeat):
            pause = SOONEST_S
            while not _is_bound(lock, f"\0allranks-build-{key}"):
                time.sleep(pause)
                pause = min(1.5 * pause, LATEST_S)
        _locks.add(lock)
        try:
            yield
        finally:
            _locks.discard(lock)


def _is_bound(lock: socket.socket, name: str) -> bool:
    try:
        lock.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


@contextmanager
def within_memory() -> Iterator[None]:
    """Within, refuse a model as soon as a parameter is larger than the free memory of the host.

    Checks parameters at their registration, mostly before they are written: the kernel allocates
    memory at the first write, and kills a process that uses too much. Parameters since the last
    check are counted together.
    """
    new_bytes = 0

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal new_bytes
        if parameter is not None:
            new_bytes += _own_bytes(parameter)
        if new_bytes < LOOK_EVERY_BYTES:
            return
        if new_bytes > (free_bytes := free_memory_bytes()):
            raise too_large(f"{name!r} of a {type(module).__name__}", new_bytes, free_bytes)
        new_bytes = 0

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _own_bytes(parameter: nn.Parameter) -> int:
    """The host memory of a parameter: 0 if it is lazy, mapped, or of another kind."""
    if is_lazy(parameter) or type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
        return 0
    try:
        storage = parameter.untyped_storage()
        return 0 if storage.filename is not None else storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return 0


def free_memory_bytes() -> int:
    """The memory this process may still use: of the host, and of all its control groups."""
    free: int = psutil.virtual_memory().available
    for kind, folder in control_groups(FILES):
        limit, usage = FILES[kind]
        with suppress(OSError, ValueError):  # no limit
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            free = min(free, room + _cache_bytes(folder))
    return max(free, 0)


def _cache_bytes(folder: Path) -> int:
    """The cached pages of files in a control group, which the kernel frees on demand."""
    rows = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(rows.get(f"total_{name}", rows.get(name, 0))) for name in CACHE)


def too_large(where: str, new_bytes: int, free_bytes: int) -> RequestError:
    return RequestError(
        asked="model() of the task, with its weights in memory",
        found=f"{new_bytes / GIB:.3g} GiB of weights more at {where}, and "
        f"{free_bytes / GIB:.3g} GiB of free memory on this host",
        why="a rank builds the model whole in the memory of the host, and then keeps its part",
        do='build it under torch.device("meta"), and let pretrained() name a safetensors file of '
        "the weights, or init(module) of the task draw them by module; see docs/task_models.md",
    )
