"""What runs in the ranks of the tests of leaving: trainers one after the other, and failures."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer_tasks
from allranks.errors import PeerLost
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch.comm.comm import CPU
from allranks.torch.comm.join import join
from allranks.torch.comm.subgroups import (
    FORMING,
    TCP_THIN_LINEAR_TIMEOUTS,
    _sockets,
    with_timeout,
)
from allranks.torch.trainer import Trainer


def one_after_the_other(argument: dict[str, Any]) -> int:
    """Rank 0 leaves a second after rank 1, which joins again at once."""
    os.environ.pop("ALLRANKS_STORE")
    os.environ.update(argument)
    for _ in range(3):
        with Trainer(trainer_tasks.Worse(), Job(strategy="ddp")) as trainer:
            trainer.step(next(iter(trainer.batches())))
            if World.from_environment().is_leader:
                time.sleep(1.0)
    return 0


def all_leave_before_any_joins_again(folder: str) -> int:
    """Between two trainings no rank has a process group, and all of them know it."""
    world = World.from_environment()
    for number in range(2):
        with Trainer(trainer_tasks.Worse(), Job(strategy="ddp")) as trainer:
            trainer.step(next(iter(trainer.batches())))
        del trainer
        gc.collect()
        Path(folder, f"{number}-{world.rank}").touch()
        while len(list(Path(folder).glob(f"{number}-*"))) < world.size:
            time.sleep(0.01)
        assert Path(world.store).exists(), "who joins now writes where the others will not look"
    return 0


def fail_during_a_save(argument: dict[str, Any]) -> int:
    """This rank fails while its checkpoint waits for the other rank, as if it had gone."""
    never = threading.Event()
    with suppress(ZeroDivisionError), Trainer(trainer_tasks.Worse(), Job(**argument)) as trainer:
        assert trainer._saving is not None
        trainer._saving.checkpointer.writers.thread.start(lambda: never.wait() and None)
        raise ZeroDivisionError
    never.set()
    return 0


def timeouts_are_linear(argument: None) -> int:
    """Those of the connections that each new group has, and of no other."""
    option = socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS

    def linear() -> int:
        number = 0
        for fd in _sockets().values():
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
                number += each.getsockopt(*option)
        return number

    with socket.create_server(("127.0.0.1", 0)) as other:
        assert linear() == 0
        comm = join(World.from_environment(), CPU, backend="gloo")
        try:
            before, first = linear(), comm.duplicate()
            comm.barrier()  # else one leaves while the other still connects
            first.leave()
            again = comm.duplicate()
            assert 0 < before < linear() and other.getsockopt(*option) == 0
            again.leave()
        finally:
            comm.leave()
    return 0


def late_hand(backend: str) -> int:
    """Rank 0 sends a state, in an elastic job, after more time than a group has to form."""
    comm = join(World.from_environment(), CPU, backend=backend, glance=lambda: None)
    state = torch.full((4,), float(comm.rank))
    try:
        if comm.rank == 0:
            time.sleep(FORMING.total_seconds() + 1)
        comm.hand(state, source=0, to=[1])
        assert state.eq(0).all()
    finally:
        comm.leave()
    return 0


def lost_in_a_message(argument: None) -> int:
    """Rank 1 ends while rank 0 sends to it: Gloo gives that message no error until its timeout.

    On a busy machine all of it may have come before, and then there is nothing to wait for.
    """
    comm = join(World.from_environment(), CPU, backend="gloo")
    with_timeout(dist.group.WORLD, timedelta(seconds=20))
    message = torch.full((32 * 2**20,), 1.0 - comm.rank)
    work = dist.broadcast(message, 0, async_op=True)
    while comm.rank == 1:
        if message[0]:
            os._exit(0)
    with suppress(PeerLost):
        comm.barrier()
    began_at = time.monotonic()
    comm.leave(failed=True)
    del comm, work
    gc.collect()
    assert time.monotonic() - began_at < 10
    return 0


def hand_to_nobody(folder: str) -> int:
    """Rank 0 hands a state to rank 1, which does not come, as other ranks form a group."""
    began_at, done = time.monotonic(), Path(folder, "done")

    def glance() -> None:
        if time.monotonic() - began_at > 1:
            raise PeerLost("others form a group")

    comm = join(World.from_environment(), CPU, backend="gloo", glance=lambda: None)
    began_at, comm.glance = time.monotonic(), glance
    if comm.rank == 0:
        with pytest.raises(PeerLost, match="others form a group"):
            comm.hand(torch.zeros(32 * 2**20), source=0, to=[1])
        done.touch()
    while not done.exists() and time.monotonic() - began_at < 20:
        time.sleep(0.01)
    comm.leave(failed=True)
    return 0
