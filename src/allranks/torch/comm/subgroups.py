"""Process groups of some ranks of a job, which are reused.

The ranks of such a group find each other by its name in the store of the job. Torch numbers the
groups of each process in that name, so ranks that are in more groups than others would use other
names, and hang. Here the name is made of the ranks and of the number of groups of these ranks so
far. A group that is given back is reused for the same ranks, while the process group of the job
exists.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from allranks.errors import FaultKind
from allranks.launcher.processes.process import is_said

Key = tuple[tuple[int, ...], str | None]
FORMING = timedelta(seconds=4)
"""How long a rank of an elastic job tries to connect to another one of its group, which may die.

Gloo waits five times as long for a rank that is to connect to this one.
"""


def with_timeout(group: Any, timeout: timedelta) -> Any:
    """The group, whose collectives take up to `timeout` from now on."""
    c10d._set_pg_timeout(timeout, group)
    return group


def borrow(ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> Any:
    """A group of these ranks of the job; each of them calls this, and `give_back` at the end."""
    idle = _idle.setdefault(dist.group.WORLD, {}).setdefault((ranks, backend), [])
    group = idle.pop() if idle else None
    if group is None:
        group = new_group(ranks, timeout, backend, use_local_synchronization=True)
    _lent[group] = ref(dist.group.WORLD), (ranks, backend)
    return group


def new_group(
    ranks: Sequence[int], timeout: timedelta, backend: str | None = None, **more: Any
) -> Any:
    """A group of these ranks of the job, connected at once where NCCL makes it.

    Torch would split a group of the job that is bound to a device. NCCL needs all its ranks for
    that, and those outside the new group never join.
    """
    with _named_by_ranks(), _not_split() as device, linear_timeouts():
        is_nccl = (backend or dist.get_backend()) == "nccl"
        bound = {"device_id": device} if device is not None and is_nccl else {}
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, **bound, **more)


TCP_THIN_LINEAR_TIMEOUTS = 16  # of linux/tcp.h


@contextmanager
def linear_timeouts() -> Iterator[None]:
    """Within, new connections of this process retransmit after equal pauses, of 0.2 s by default.

    Otherwise each pause is twice as long as the one before, so after a link was cut for 1 s the
    others wait up to 0.6 s more. Linux does so six times, for at most three packets under way, and
    not under BBR. Each message of Gloo begins with so few.
    """
    before, yes = set(_sockets()), ctypes.c_int(1)
    yield
    for name, fd in _sockets().items():
        if name not in before:  # a socket of Python would change how it blocks
            setting = socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, ctypes.byref(yes), 4
            ctypes.CDLL(None).setsockopt(fd, *setting)


def _sockets() -> dict[str, int]:
    """A descriptor of each open socket of this process, by the name that the kernel gives it."""
    names: dict[str, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing is closed
            names[os.readlink(f"/proc/self/fd/{fd}")] = int(fd)
    return {name: fd for name, fd in names.items() if name.startswith("socket:")}


@contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Within, torch names new groups by `_name`."""
    torchs: Any = c10d
    original, torchs._process_group_name = torchs._process_group_name, _name
    try:
        yield
    finally:
        torchs._process_group_name = original


def _name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """The name, the same on all `ranks`: they make groups of these ranks in the same order."""
    numbers = _numbers.setdefault(dist.group.WORLD, Counter())
    numbers[tuple(ranks)] += 1
    text = "_".join(map(str, (*ranks, numbers[tuple(ranks)])))
    return "allranks-" + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def _not_split() -> Iterator[Any]:
    """Within, the group of the job is bound to no device; yields its device."""
    of_job: Any = dist.group.WORLD
    device, of_job.bound_device_id = of_job.bound_device_id, None
    try:
        yield device
    finally:
        of_job.bound_device_id = device


def give_back(group: Any) -> bool:
    """Keep a borrowed `group` for the next `borrow`; returns False if it was not borrowed.

    If the process group of the job has changed since, the group has gone with the old one.
    """
    if group is None or group not in _lent:
        return False
    of, key = _lent.pop(group)
    if of() is dist.group.WORLD:
        _idle[dist.group.WORLD][key].append(group)
    return True


def end(group: Any, *, failed: bool) -> None:
    """Destroy a group for good, or the process group of the job with all others (`None`).

    NCCL waits until all collectives are over. After a failure of this rank they never are, so its
    groups are aborted. Gloo closes its connections at once, and the other ranks get an error.
    """
    if failed and dist.get_backend(group) == "nccl":
        with suppress(RuntimeError, ValueError):  # the failure itself is what counts
            c10d._abort_process_group(group)
        return
    if failed:
        _close_connections(group or dist.group.WORLD)
    dist.destroy_process_group(group)


UNUSED_TAG = 2**30 + 1
LOOK_S = 0.1


def _close_connections(group: Any) -> None:
    """Close those of a Gloo group, so that its collectives fail, here and on other ranks.

    Gloo closes them with the last reference to the group, and its own collectives under way have
    one; its `abort` does nothing. A message that does not come in time closes all of them.
    """
    if dist.get_backend(group) == "nccl":
        return
    backend: Any = group._get_backend(torch.device("cpu"))
    is_of_both = hasattr(backend, "leaders")  # a group over shared memory and a network
    for part in (backend.leaders, backend.gloo) if is_of_both else (group,):
        gloo = None if part is None else part._get_backend(torch.device("cpu"))
        if type(gloo).__name__ == "ProcessGroupGloo":
            _close_each(gloo)
            _outlive(part)


def _outlive(group: Any) -> None:
    """Drop the last reference to a Gloo group in a thread: its destructor waits for collectives.

    When a connection breaks, Gloo gives the error to all messages that wait for it, but not to one
    that is half sent or half received. That one ends with its timeout.
    """
    groups = [group]

    def wait() -> None:
        group, other = groups.pop(), object()
        while sys.getrefcount(group) > sys.getrefcount(other):
            time.sleep(LOOK_S)

    threading.Thread(target=wait, name="allranks-left-group", daemon=True).start()


def _close_each(backend: Any) -> None:
    """Close the connections of Gloo to each peer."""
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        try:
            backend.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:  # that of a peer which is lost closes no other connection
            if is_said(FaultKind.TIMED_OUT, str(error)):
                return


_numbers: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
_idle: WeakKeyDictionary[Any, dict[Key, list[Any]]] = WeakKeyDictionary()
_lent: WeakKeyDictionary[Any, tuple[ref[Any], Key]] = WeakKeyDictionary()


# --- flattened -----------------------------------------------------------------------------------
# Many tensors as few messages of bytes, for a broadcast: flat, and of one dtype each.
#
# NCCL takes only contiguous memory and dtypes that it can add: no transposed or expanded tensors,
# and no 16-bit integers. It always takes bytes, and a model of 320 tensors needs only a few
# messages. A large contiguous tensor is sent in place, without a copy.


MESSAGE_BYTES = 16 * 2**20


def messages_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of each message: of one dtype, and at most a message in size or alone."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    waiting_bytes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        tensor = tensor.detach()
        kind, size = tensor.dtype, tensor.nbytes
        ahead = waiting.setdefault(kind, [])
        if ahead and waiting_bytes[kind] + size > MESSAGE_BYTES:
            yield ahead
            ahead = waiting[kind] = []
            waiting_bytes[kind] = 0
        ahead.append(tensor)
        waiting_bytes[kind] += size
    yield from (ahead for ahead in waiting.values() if ahead)


def packed(tensors: Sequence[Tensor], *, read: bool) -> Tensor:
    """One message of bytes for these tensors; it has their content only with `read`."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and not (first.is_conj() or first.is_neg()):
        return first.view(-1).view(torch.uint8)
    if read:
        flat = torch.cat([tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])
    else:
        flat = first.new_empty(sum(tensor.numel() for tensor in tensors))
    return flat.view(torch.uint8)


def unpack(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a message into its tensors."""
    flat = message.view(tensors[0].dtype)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        if tensor.data_ptr() == part.data_ptr():
            continue
        part = part.view(tensor.shape)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # expanded: each element in memory is written once
                tensor, part = tensor.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
        tensor.copy_(part)
