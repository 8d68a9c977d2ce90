"""Where the processes of a job find each other, and where they part.

Every one binds a port, and hears those of all: on one machine through a file in the run folder, on
several nodes through the socket that the launcher gave to the leader. TensorFlow's own server
listens at the port then; it is held for it until it does (`ReservedPorts.close`).

Who has its part of the last sum may still be read from by others, so nobody leaves before all have
theirs (`ReservedPorts.part`); a collective of TensorFlow cannot say that of itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from allranks.errors import PeerLost, RequestError
from allranks.launcher.nodes.channel import (
    Admission,
    Channel,
    Disconnected,
    Refused,
    authenticate,
    wait_for,
)
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.world import World, master_endpoint

TIMEOUT_S = 600.0  # whoever started the processes sees earlier that one of them is gone
LOOK_S = 0.02
BACKLOG = 128
LOCALHOST = "127.0.0.1"
PARTING = "parting"
WENT_AWAY = "another process went away while the ranks met"


class ProcessExchange(Protocol):
    """A way for all processes to tell each other something once under one word."""

    def all(self, word: str, own: Any) -> list[Any]:
        """What every process told under `word`, in order; returns when all have."""
        ...

    def close(self) -> None: ...


@dataclass
class ReservedPorts:
    """The `host:port` of all processes, in order; the own port is held until `close`."""

    addresses: list[str]
    _exchange: ProcessExchange
    _port: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Let the port go: TensorFlow's server listens there by now."""
        self._port.close()

    def part(self) -> None:
        """Return when every process has called this; nothing more is sent after it."""
        with suppress(PeerLost):  # it has parted, or whoever started it sees what became of it
            self._exchange.all(PARTING, None)
        self._exchange.close()


def meet(world: World) -> ReservedPorts:
    """Bind a port, and exchange it with the other processes of `world`; every one calls this.

    Raises `PeerLost` if one of them does not come.
    """
    with ExitStack() as stack:
        port = stack.enter_context(Reservation(1)).ports[0]
        exchange = _exchange_of(world)
        told = exchange.all("address", [exchange.host, port])
        addresses = [f"{host}:{number}" for host, number in told]
        return ReservedPorts(addresses, exchange, stack.pop_all())


def _exchange_of(world: World) -> _Alone | _ByFile | _AsLeader | _ByLeader:
    if world.size == 1:
        return _Alone()
    if world.store:
        return _ByFile(world)
    if not world.rendezvous:  # another launcher started this process
        world = dataclasses.replace(world, rendezvous=master_endpoint(), listener=-1)
        if not world.rendezvous:
            raise RequestError(
                asked=f"to be rank {world.rank} of {world.size}",
                found="neither MASTER_ADDR nor MASTER_PORT in the environment",
                why="the ranks must find each other somewhere",
                do="start them with `allranks train`, `allranks run` or srun",
            )
    return _AsLeader(world) if world.rank == 0 else _ByLeader(world)


class _Alone:
    """One process."""

    host = LOCALHOST

    def all(self, word: str, own: Any) -> list[Any]:
        return [own]

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class _ByFile:
    """Each process adds a line; the file belongs to one attempt."""

    world: World
    host: str = LOCALHOST

    def all(self, word: str, own: Any) -> list[Any]:
        world, path = self.world, Path(self.world.store)
        line = json.dumps([word, world.rank, own]) + "\n"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            lines = [x for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]
            said = [json.loads(one) for one in lines]
            found = {rank: what for about, rank, what in said if about == word}
            if len(found) == world.size:
                return [found[rank] for rank in range(world.size)]
            _give_up_after(deadline, world, found)
            time.sleep(LOOK_S)

    def close(self) -> None:
        """The file goes with the attempt."""


class _AsLeader:
    """The leader listens, and tells everybody what everybody has told it.

    Who comes proves first that it knows the secret of the job. Where another launcher started the
    ranks there is none: then it only has to speak as one of ours.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.host = _bracketed(world.rendezvous.rpartition(":")[0].strip("[]"))
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
        """Give a rank its place; who is none of those that are missing is turned away."""
        is_missing = type(rank) is int and 0 < rank < self.world.size and rank not in self._ranks
        with suppress(Disconnected):
            if is_missing:
                channel.send({"rank": rank})
                self._ranks[rank] = channel
                return
            channel.send({"refused": f"rank {rank!r} is not one that is missing"})
        channel.close()

    def all(self, word: str, own: Any) -> list[Any]:
        told = {rank: _heard(channel, word) for rank, channel in self._ranks.items()}
        told[0] = own
        everything = [told[rank] for rank in range(self.world.size)]
        for channel in self._ranks.values():
            with suppress(Disconnected):  # it has left: it does not want to hear it
                channel.send({word: everything})
        return everything

    def close(self) -> None:
        for channel in self._ranks.values():
            channel.close()


def _listener_of(world: World) -> socket.socket:
    """The socket that the launcher gave to the leader, or one at the address that it left to it."""
    if world.listener >= 0:
        return socket.socket(fileno=os.dup(world.listener))
    address, _, port = world.rendezvous.rpartition(":")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise RequestError(
            asked=f"to meet the other ranks at {world.rendezvous}",
            found=str(error),
            why="rank 0 serves the others there, and somebody else listens at it",
            do="start them with `allranks run`: torchrun keeps that port for its own store",
        ) from error


class _ByLeader:
    """All others tell the leader, and hear from it."""

    def __init__(self, world: World) -> None:
        address, _, port = world.rendezvous.rpartition(":")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                where = address.strip("[]"), int(port)
                self._channel = Channel(socket.create_connection(where, timeout=TIMEOUT_S))
                break
            except ConnectionError:
                _give_up_after(deadline, world, {world.rank})
                time.sleep(LOOK_S)
        self.host = _bracketed(self._channel.own_address)
        try:
            authenticate(self._channel, world.secret.encode())
            self._channel.send({"rank": world.rank})
            answer = self._channel.wait_for_one(TIMEOUT_S)
            if "refused" in answer:
                raise Refused(str(answer["refused"]))
        except Disconnected as error:
            self.close()
            raise PeerLost(f"the leader does not let rank {world.rank} in: {error}") from error

    def all(self, word: str, own: Any) -> list[Any]:
        try:
            self._channel.send({word: own})
        except Disconnected as error:
            raise PeerLost(f"{WENT_AWAY}: {error}") from error
        told: list[Any] = _heard(self._channel, word)
        return told

    def close(self) -> None:
        self._channel.close()


def _heard(channel: Channel, word: str) -> Any:
    """What a process tells under this word."""
    try:
        return channel.wait_for_one(TIMEOUT_S)[word]
    except (Disconnected, KeyError) as error:
        raise PeerLost(f"{WENT_AWAY}: {error}") from error


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _give_up_after(deadline: float, world: World, here: Collection[int]) -> None:
    if time.monotonic() > deadline:
        missing = sorted(set(range(world.size)) - set(here))
        raise PeerLost(f"ranks {missing} did not come within {TIMEOUT_S:.0f} s")
