"""How the ranks of a job meet: the store in which they find each other, and their process group."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    TCPStore,
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
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.rank_sync import Meetings
from allranks.torch.comm.subgroups import TIMEOUT, translated
from allranks.torch.machine import check_own_device

PATIENCE_S = 5.0
NCCL = "nccl"
SHARED_BY_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
_joins, _trainings = itertools.count(), itertools.count()


def join(
    world: World,
    device: torch.device,
    heartbeat: Heartbeat | None = None,
    backend: str = "",
    *,
    share_device: bool = False,
) -> Comm:
    """Meet the other ranks of `world`; every rank calls this, and `leave` at the end.

    `backend` is that of torch's process group; by itself it is the device's, and on the host
    memory that the ranks share, where they can. With `share_device` several ranks may have one
    device.

    A process group that is there already is used as it is, and left to whoever made it. A process
    keeps the store of its first join, and each join has keys of its own in it: a second one finds
    neither stale keys nor the store that another rank is about to close.
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
        meetings = _meetings_in(_get_default_store(), world) if world.size > 1 else None
        return Comm(*there, device, heartbeat=heartbeat, meetings=meetings)
    if world.size == 1 or world.role != TRAINER:  # those with roles exchange messages
        return Comm(device=device, heartbeat=heartbeat)
    try:
        keys = f"attempt-{world.attempt}/join-{next(_joins)}"
        store = PrefixStore(keys, _store_of(world))
        if share_device:
            backend = _backend_of_shared(device, backend, world, store)
        else:
            backend = backend or _backend_of(device)
            check_own_device(device, world, store)
        shared_memory.register(world.segment)
        supervised = bool(world.store or world.rendezvous)  # then its launcher says who is missing
        with nullcontext() if supervised else _waiting(world, master_endpoint()):
            dist.init_process_group(
                backend,
                rank=world.rank,
                world_size=world.size,
                timeout=TIMEOUT,
                store=store,
                device_id=device if backend == NCCL else None,  # errors come here, not in a step
            )
    except RuntimeError as error:
        raise translated(error) from error
    meetings = _meetings_in(store, world)
    return Comm(
        world.rank, world.size, device, owns_group=True, heartbeat=heartbeat, meetings=meetings
    )


def _backend_of(device: torch.device) -> str:
    on_host = not accelerator.is_accelerator(device)
    return shared_memory.SHARED if on_host else accelerator.backend_of(device)


def _backend_of_shared(device: torch.device, asked: str, world: World, store: Any) -> str:
    """What ranks that share devices talk over, as rank 0 decides: NCCL, if it can, or the host."""
    can = accelerator.nccl_shares_devices(device)
    if asked == NCCL and not can:
        raise RequestError(
            asked=f"--device {device.type} --share-device --backend {NCCL}",
            found=accelerator.decides_bits(device.type)["nccl"] or "no NCCL",
            why="NCCL takes several ranks on one GPU from version 2.31 on",
            do="leave --backend out: tensors go over the host",
        )
    if world.rank == 0:
        store.set("device/backend", NCCL if can and asked != through_host.GLOO else "")
    if store.get("device/backend").decode() == NCCL:
        for name, value in SHARED_BY_NCCL.items():
            os.environ.setdefault(name, value)
        return NCCL
    through_host.register()
    return through_host.BACKEND


def _meetings_in(store: Any, world: World) -> Meetings:
    own = PrefixStore(f"meetings-{next(_trainings)}", store)
    return Meetings(own, world.rank, world.size, TIMEOUT)


def _store_of(world: World) -> Any:
    """Where the ranks find each other: a file on one machine, else a port that rank 0 was given.

    Only that address listens, and whoever started the ranks has bound it: nobody can be first.
    Another launcher says where in the environment.
    """
    if world.store:
        if world.store not in _met:  # torch removes the file as the last store of it goes
            _met[world.store] = FileStore(world.store, world.size)
        return _met[world.store]
    if not world.rendezvous:
        return _store_of_environment(world)
    if world.rendezvous not in _met:
        host, _, port = world.rendezvous.rpartition(":")
        serves: dict[str, Any] = {"is_master": False}
        if world.rank == 0:
            serves = {"is_master": True, "master_listen_fd": world.listener}
        _met[world.rendezvous] = TCPStore(
            host, int(port), world.size, timeout=TIMEOUT, wait_for_workers=False, **serves
        )
    return _met[world.rendezvous]


def _store_of_environment(world: World) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, or torchrun's own, as torch finds it."""
    where = master_endpoint()
    if where not in _met:
        with _waiting(world, where):
            _met[where], _, _ = next(rendezvous("env://", world.rank, world.size, timeout=TIMEOUT))
    return _met[where]


@contextmanager
def _waiting(world: World, where: str) -> Iterator[None]:
    """Within, another rank is waited for: who has waited for some seconds says so, once.

    Nobody watches these ranks but their own launcher, and a variable that a shell has left over
    makes a world of ranks that never come.
    """

    def tell() -> None:
        sys.stderr.write(
            f"allranks: rank {world.rank} waits at {where} for the other ranks: RANK and "
            f"WORLD_SIZE say that there are {world.size}. Start them, or unset both.\n"
        )
        sys.stderr.flush()

    timer = threading.Timer(PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


_met: dict[str, Any] = {}  # a second join of a process meets where the first did
