"""Rendezvous of the processes of a job, and a barrier at their end.

Every process binds a port, sends its address to the leader, and receives those of all. The port
stays reserved until TensorFlow's own server listens at it (`ReservedPorts.close`).

Others may still read the last sum from a process that has its own part. So no process leaves
before all have theirs (`ReservedPorts.part`); TensorFlow's collectives do not ensure that.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import PeerLost, RequestError
from allranks.launcher.messages import LOCALHOST, address_of_rank_0, listen
from allranks.launcher.nodes.channel import (
    Admission,
    Channel,
    Disconnected,
    Refused,
    authenticate,
    wait_for,
)
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.scripts.topology import bracketed
from allranks.launcher.world import World, master_endpoint

TIMEOUT_S = 600.0  # the launcher notices a lost process earlier
LOOK_S = 0.02
BACKLOG = 128
PARTING = "parting"
WENT_AWAY = "another process went away while the ranks met"


@dataclass
class ReservedPorts:
    """The `host:port` of all processes, by rank; this process's port is reserved until `close`."""

    addresses: list[str]
    _exchange: _AsLeader | _ByLeader | None
    _port: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release the port, once TensorFlow's server listens there."""
        self._port.close()

    def part(self) -> None:
        """Return when every process has called this; nothing more is sent after it."""
        if self._exchange is not None:
            with suppress(PeerLost):  # the peer has left, or the launcher handles its fault
                self._exchange.all(PARTING, None)
            self._exchange.close()


def meet(world: World) -> ReservedPorts:
    """Bind a port, and exchange it with the other processes of `world`; all of them call this.

    Raises `PeerLost` if one of them does not join.
    """
    with ExitStack() as stack:
        port = stack.enter_context(Reservation(1)).ports[0]
        exchange = _exchange_of(world)
        endpoints: list[Any] = [[LOCALHOST, port]]
        if exchange is not None:
            endpoints = exchange.all("address", [exchange.host, port])
        addresses = [f"{host}:{number}" for host, number in endpoints]
        return ReservedPorts(addresses, exchange, stack.pop_all())


def _exchange_of(world: World) -> _AsLeader | _ByLeader | None:
    """The way in which all processes exchange a value under a word, once; `None` for one alone."""
    if world.size == 1:
        return None
    if not (world.store or world.rendezvous):  # another launcher started this process
        world = dataclasses.replace(world, rendezvous=master_endpoint(), listener=-1)
        if not world.rendezvous:
            raise RequestError(
                asked=f"to be rank {world.rank} of {world.size}",
                found="neither MASTER_ADDR nor MASTER_PORT in the environment",
                why="the ranks must find each other somewhere",
                do="start them with `allranks train`, `allranks run` or srun",
            )
    return _AsLeader(world) if world.rank == 0 else _ByLeader(world)


class _AsLeader:
    """The leader listens, collects the values of all ranks, and sends them to all.

    A rank first proves that it knows the secret of the job. Without one (another launcher started
    the ranks) it only has to follow the protocol.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.host = bracketed(world.rendezvous.rpartition(":")[0].strip("[]") or LOCALHOST)
        self._ranks: dict[int, Channel] = {}
        deadline = time.monotonic() + TIMEOUT_S
        with ExitStack() as stack:
            listener = stack.enter_context(_listener_of(world))
            listener.listen(max(BACKLOG, world.size))
            admission = Admission(listener, world.secret)
            stack.callback(admission.close)
            while len(self._ranks) < world.size - 1:
                wait_for(admission.ready, 1.0)
                for channel, hello in admission.admit():
                    self._seat(channel, hello.get("rank"))
                _give_up_after(deadline, world, {0, *self._ranks})

    def _seat(self, channel: Channel, rank: Any) -> None:
        """Accept a missing rank; refuse any other."""
        is_missing = type(rank) is int and 0 < rank < self.world.size and rank not in self._ranks
        with suppress(Disconnected):
            if is_missing:
                channel.send({"rank": rank})
                self._ranks[rank] = channel
                return
            channel.send({"refused": f"rank {rank!r} is not one that is missing"})
        channel.close()

    def all(self, word: str, value: Any) -> list[Any]:
        values = {rank: _receive(channel, word) for rank, channel in self._ranks.items()}
        values[0] = value
        everything = [values[rank] for rank in range(self.world.size)]
        for channel in self._ranks.values():
            with suppress(Disconnected):  # it has left already
                channel.send({word: everything})
        return everything

    def close(self) -> None:
        for channel in self._ranks.values():
            channel.close()


def _listener_of(world: World) -> socket.socket:
    """The socket at which the other ranks find the leader."""
    try:
        return listen(world)
    except OSError as error:
        if not world.rendezvous:  # what failed is the file of the store
            raise
        raise RequestError(
            asked=f"to meet the other ranks at {world.rendezvous}",
            found=str(error),
            why="rank 0 serves the others there, and somebody else listens at it",
            do="start them with `allranks run`: torchrun keeps that port for its own store",
        ) from error


class _ByLeader:
    """All other ranks send to the leader, and receive from it."""

    def __init__(self, world: World) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with suppress(ConnectionError):
                if (where := address_of_rank_0(world)) is not None:
                    self._channel = Channel(socket.create_connection(where, timeout=TIMEOUT_S))
                    break
            _give_up_after(deadline, world, {world.rank})
            time.sleep(LOOK_S)
        self.host = bracketed(self._channel.own_address)
        try:
            authenticate(self._channel, world.secret.encode())
            self._channel.send({"rank": world.rank})
            answer = self._channel.wait_for_one(TIMEOUT_S)
            if "refused" in answer:
                raise Refused(str(answer["refused"]))
        except Disconnected as error:
            self.close()
            raise PeerLost(f"the leader does not let rank {world.rank} in: {error}") from error

    def all(self, word: str, value: Any) -> list[Any]:
        try:
            self._channel.send({word: value})
        except Disconnected as error:
            raise PeerLost(f"{WENT_AWAY}: {error}") from error
        values: list[Any] = _receive(self._channel, word)
        return values

    def close(self) -> None:
        self._channel.close()


def _receive(channel: Channel, word: str) -> Any:
    """The value that a process sends under this word."""
    try:
        return channel.wait_for_one(TIMEOUT_S)[word]
    except (Disconnected, KeyError) as error:
        raise PeerLost(f"{WENT_AWAY}: {error}") from error


def _give_up_after(deadline: float, world: World, here: Collection[int]) -> None:
    if time.monotonic() > deadline:
        missing = sorted(set(range(world.size)) - set(here))
        raise PeerLost(f"ranks {missing} did not come within {TIMEOUT_S:.0f} s")
