"""One rank of a node builds the model at a time, and keeps its part before the next one begins.

The host then holds one whole model and the parts of all ranks. Ranks of other nodes build at the
same time. The turn is a lock of the kernel, which ends with its process: no rank waits for one that
has died, and none reads what another has left behind.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from allranks.errors import RequestError
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.launcher.processes.linux import control_groups
from allranks.launcher.world import World, master_endpoint
from allranks.torch.comm.subgroups import in_exchange

SOONEST_S, LATEST_S = 0.0005, 0.05  # between two attempts to take the lock
FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Of a control group, by controller ("" in version 2): its limit, and what it uses."""
CACHE = ("inactive_file", "active_file")
GIB = 2**30
LOOK_EVERY_BYTES = 2**26

_locks: set[socket.socket] = set()


def _close_in_child() -> None:
    """A process that the program starts in its turn, and that lives on, has no part in the lock."""
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def build_turn(world: World, heartbeat: Heartbeat | SaveThreadHeartbeat | None) -> Iterator[None]:
    """Within, no other rank of this job on this node is in its turn.

    Nothing within may wait for other ranks. The lock is the name of a socket that nobody connects
    to: in Linux's abstract name space, which each simulated node has of its own.
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

    Parameters are looked at as they are registered, which is mostly before they are written: the
    kernel gives memory with the first write, and kills a process that has too much. What was
    registered since the last look counts with it.
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
    """What a parameter takes of the host: nothing where it is lazy, mapped or another kind."""
    if is_lazy(parameter) or type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
        return 0
    try:
        storage = parameter.untyped_storage()
        return 0 if storage.filename is not None else storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return 0


def free_memory_bytes() -> int:
    """What this process may still use: of the host, and of its control group and those around."""
    free: int = psutil.virtual_memory().available
    for kind, folder in control_groups(FILES):
        limit, usage = FILES[kind]
        with suppress(OSError, ValueError):  # no limit
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            free = min(free, room + _cache_bytes(folder))
    return max(free, 0)


def _cache_bytes(folder: Path) -> int:
    """The pages of files that a control group holds, which the kernel takes back when it needs."""
    rows = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(rows.get(f"total_{name}", rows.get(name, 0))) for name in CACHE)


def too_large(where: str, new_bytes: int, free_bytes: int) -> RequestError:
    return RequestError(
        asked="model() of the task, with its weights in memory",
        found=f"{new_bytes / GIB:.3g} GiB of weights more at {where}, and "
        f"{free_bytes / GIB:.3g} GiB of free memory on this host",
        why="a rank builds the model whole in the memory of the host, and then keeps its part",
        do='build it under torch.device("meta"), and let pretrained() name a safetensors file of '
        "the weights, or init(module) of the task draw them module by module; see docs/tasks.md",
    )
