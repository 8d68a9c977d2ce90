"""Rendezvous of the ranks of a job: the store, and the process group."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
    rendezvous,
)
from torch.distributed.distributed_c10d import _get_default_store

import allranks.torch.accelerator as accelerator
import allranks.torch.comm.through_host as through_host
import allranks.torch.shared_memory.backend as shared_memory
from allranks.errors import RequestError
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World, master_endpoint
from allranks.strategies.roles import TRAINER
from allranks.torch.comm.comm import TIMEOUT, Comm, translated
from allranks.torch.comm.rank_sync import StoreBarrier
from allranks.torch.comm.subgroups import FORMING, linear_timeouts, with_timeout
from allranks.torch.machine import check_own_device

PATIENCE_S = 5.0
LOOK_S = 0.02
SOONEST_S, LATEST_S = 0.001, 0.01  # between two looks at the keys of others
NCCL, GLANCING = "nccl", "glancing"
SHARED_BY_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
T = TypeVar("T")
_joins, _trainings = itertools.count(), itertools.count()


def join(
    world: World,
    device: torch.device,
    heartbeat: Heartbeat | None = None,
    backend: str = "",
    *,
    share_device: bool = False,
    glance: Callable[[], None] | None = None,
) -> Comm:
    """Join the other ranks of `world`; every rank calls this, and `leave` at the end.

    `backend` is the backend of torch's process group. The default is that of the device, and on the
    host shared memory where possible. With `share_device` several ranks may use one device.
    `glance` is called in all waits of an elastic job, and raises if other ranks form a group now.

    An existing process group is used as it is and not destroyed. A process keeps the store of its
    first join, and each join uses a new key prefix. So a second join sees neither stale
    keys nor a store that another rank is about to close.
    """
    if dist.is_initialized():
        there = dist.get_rank(), dist.get_world_size()
        if there != (world.rank, world.size):
            raise RequestError(
                asked=f"to be rank {world.rank} of {world.size}, as RANK and WORLD_SIZE say",
                found=f"a process group in which this process is rank {there[0]} of {there[1]}",
                why="the ranks would share out the data in one way, and the sums in another",
                do="set RANK and WORLD_SIZE as the group has them, or let the trainer make it",
            )
        store_barrier = _barrier_in(_get_default_store(), world) if world.size > 1 else None
        return Comm(*there, device, heartbeat=heartbeat, store_barrier=store_barrier)
    if world.size == 1 or world.role != TRAINER:  # other roles exchange messages
        return Comm(device=device, heartbeat=heartbeat)
    try:
        store = _prefixed_store(world, glance)
        if share_device:
            backend = _backend_of_shared(device, backend, world, store)
        else:
            backend = backend or _backend_of(device)
            check_own_device(device, world, store)
        shared_memory.register(world.segment)
        supervised = bool(world.store or world.rendezvous)  # then its launcher names missing ranks
        waiting = nullcontext() if supervised else _waiting(world, master_endpoint())
        with waiting, linear_timeouts():
            dist.init_process_group(
                backend,
                rank=world.rank,
                world_size=world.size,
                timeout=TIMEOUT if glance is None else FORMING,
                store=store,
                device_id=device if backend == NCCL else None,  # errors come here, not in a step
            )
    except RuntimeError as error:
        raise translated(error) from error
    comm = Comm(world.rank, world.size, device, owns_group=True, heartbeat=heartbeat)
    comm.store_barrier, comm.glance = _barrier_in(store, world, glance), glance
    if glance is not None:
        with_timeout(dist.group.WORLD, TIMEOUT)
    return comm


def _prefixed_store(world: World, glance: Callable[[], None] | None) -> Any:
    """The store of these ranks, with a prefix that no other join of theirs has."""
    joins = next(_joins) if glance is None else world.group  # a newcomer has made fewer
    if glance is None:
        store = _store_of(world)
    else:
        # torch counts groups by name, also one that came to nothing on some of these ranks
        distributed_c10d._world.group_count = 0
        # C++ keeps no reference to what Python has added to a store
        store = _stores[GLANCING] = GlancingStore(partial(_store_of, world), glance)
    return PrefixStore(f"attempt-{world.attempt}/join-{joins}", store)


class GlancingStore(Store):
    """A store in which a wait calls `glance` often, which may raise an error.

    A rank that is lost while a group forms would hold up the others for minutes: if it serves the
    store, also with one call. So a thread `connect`s to the store, and calls it; a call that this
    rank does not wait for any more is left to it.
    """

    def __init__(self, connect: Callable[[], Any], glance: Callable[[], None]) -> None:
        super().__init__()
        self.glance, self.thread = glance, ThreadPoolExecutor(1, "allranks-store")
        self.store = self.call(connect)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a call of the thread; raises what it raises, or `glance`."""
        result = self.thread.submit(function, *args)
        while not wait([result], LOOK_S).done:
            self.glance()
        return result.result()

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        until, pause_s = time.monotonic() + TIMEOUT.total_seconds(), SOONEST_S
        while not self.check(keys):
            self.glance()
            if time.monotonic() > until:  # a rank may compute for long
                raise RuntimeError(f"wait timeout after {TIMEOUT} for {keys}")
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, LATEST_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self.call(self.store.get, key))

    def set(self, key: str, value: Any) -> None:
        self.call(self.store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self.call(self.store.add, key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.call(self.store.check, keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self.call(self.store.compare_set, key, expected, desired))

    def deleteKey(self, key: str) -> bool:  # torch calls it so
        return bool(self.call(self.store.delete_key, key))

    def getNumKeys(self) -> int:  # torch calls it so
        return int(self.call(self.store.num_keys))

    def set_timeout(self, timeout: timedelta) -> None:
        self.call(self.store.set_timeout, timeout)


def _backend_of(device: torch.device) -> str:
    on_host = not accelerator.is_accelerator(device)
    return shared_memory.SHARED if on_host else accelerator.backend_of(device)


def _backend_of_shared(device: torch.device, requested: str, world: World, store: Any) -> str:
    """The backend of ranks that share devices, as rank 0 decides: NCCL if it can, or the host."""
    can = accelerator.nccl_shares_devices(device)
    if requested == NCCL and not can:
        raise RequestError(
            asked=f"--device {device.type} --share-device --backend {NCCL}",
            found=accelerator.decides_bits(device.type)["nccl"] or "no NCCL",
            why="NCCL takes several ranks on one GPU from version 2.31 on",
            do="leave --backend out: tensors go over the host",
        )
    if world.rank == 0:
        store.set("device/backend", NCCL if can and requested != through_host.GLOO else "")
    if store.get("device/backend").decode() == NCCL:
        for name, value in SHARED_BY_NCCL.items():
            os.environ.setdefault(name, value)
        return NCCL
    through_host.register()
    return through_host.BACKEND


def _barrier_in(store: Any, world: World, glance: Callable[[], None] | None = None) -> StoreBarrier:
    prefixed = PrefixStore(f"meetings-{next(_trainings) if glance is None else 0}", store)
    return StoreBarrier(prefixed, world.rank, world.size, TIMEOUT, glance=glance)


def _store_of(world: World) -> Any:
    """The rendezvous store: a file on one machine, else a port that rank 0 was given.

    The launcher of the ranks has bound that address, so no other process can take it. Another
    launcher gives the address in the environment. Each rank of an elastic job was given one, which
    it serves for its life once it leads a group; another rank may listen there after it.
    """
    if world.store:
        if world.store not in _stores:  # torch removes the file with its last store
            _stores[world.store] = FileStore(world.store, world.size)
        return _stores[world.store]
    if not world.rendezvous:
        return _store_of_environment(world)
    host, _, port = world.rendezvous.rpartition(":")
    where: dict[str, Any] = {"host_name": host, "port": int(port), "world_size": world.size}
    where |= {"timeout": TIMEOUT, "wait_for_workers": False}
    if world.rank == 0:
        with _serving:  # a thread of the group before may be about to serve it
            if world.rendezvous not in _stores:
                where |= {"is_master": True, "master_listen_fd": world.listener}
                _stores[world.rendezvous] = TCPStore(**where)
    if world.rendezvous in _stores:
        return _stores[world.rendezvous]
    store = TCPStore(**where, is_master=False)
    if world.group == 0:  # the ranks of a later group connect for that group
        _stores[world.rendezvous] = store
    return store


def store_of_stream(world: World, where: str, number: int, ranks: int) -> Any:
    """A store for some ranks that are in no group together: beside that of the group at `where`."""
    name, patience = f"stream-{number}", timedelta(minutes=1)
    if world.store:
        store = FileStore(f"{world.base_store}-{name}", ranks)
        store.set_timeout(patience)
        return store
    host, _, port = where.rpartition(":")
    return PrefixStore(
        f"attempt-{world.attempt}/{name}", TCPStore(host, int(port), timeout=patience)
    )


def _store_of_environment(world: World) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, or torchrun's own, as torch finds it."""
    where = master_endpoint()
    if where not in _stores:
        with _waiting(world, where):
            stores = rendezvous("env://", world.rank, world.size, timeout=TIMEOUT)
            _stores[where], _, _ = next(stores)
    return _stores[where]


@contextmanager
def _waiting(world: World, where: str) -> Iterator[None]:
    """Within, this rank waits for others; after some seconds it writes one line about it.

    Only a foreign launcher watches these ranks. A stale variable of a shell can set a world size of
    ranks that never come.
    """

    def warn() -> None:
        sys.stderr.write(
            f"allranks: rank {world.rank} waits at {where} for the other ranks: RANK and "
            f"WORLD_SIZE say that there are {world.size}. Start them, or unset both.\n"
        )
        sys.stderr.flush()

    timer = threading.Timer(PATIENCE_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


_stores: dict[str, Any] = {}  # a second join of a process uses the store of the first
_serving = threading.Lock()
