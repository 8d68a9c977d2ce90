"""One rank of a node builds the model at a time, and keeps its part before the next one begins.

So the host has at most one whole model and the parts of all ranks. Ranks of other nodes build at
the same time. The turn is a lock of the kernel, which is released with its process: no rank waits
for a dead one, and nothing is left behind.
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
        "the weights, or init(module) of the task draw them module by module; see docs/tasks.md",
    )
