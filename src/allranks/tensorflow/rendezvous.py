"""Where the processes of a job find each other, and where they part.

Every one binds a port, and hears those of all: on one machine through a file in the run folder, on
several nodes through the socket that the launcher gave to the leader. TensorFlow's own server
listens at the port then; it is held for it until it does (`Held.close`).

Who has its part of the last sum may still be read from by others, so nobody leaves before all have
theirs (`Held.part`); a collective of TensorFlow cannot say that of itself.
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
from typing import IO, Any, Protocol

from allranks.errors import PeerLost, RequestError
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.world import World, master_endpoint

TIMEOUT_S = 600.0  # whoever started the processes sees earlier that one of them is gone
LOOK_S = 0.02
GREETING_S = 10.0
LOCALHOST = "127.0.0.1"
PARTING = "parting"


class Exchange(Protocol):
    """A way for all processes to tell each other something once under one word."""

    def all(self, word: str, own: Any) -> list[Any]:
        """What every process told under `word`, in order; returns when all have."""
        ...

    def close(self) -> None: ...


@dataclass
class Held:
    """The `host:port` of all processes, in order; the own port is held until `close`."""

    addresses: list[str]
    _exchange: Exchange
    _port: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Let the port go: TensorFlow's server listens there by now."""
        self._port.close()

    def part(self) -> None:
        """Return when every process has called this; nothing more is sent after it."""
        with suppress(PeerLost):  # it has parted, or whoever started it sees what became of it
            self._exchange.all(PARTING, None)
        self._exchange.close()


def meet(world: World) -> Held:
    """Bind a port, and exchange it with the other processes of `world`; every one calls this.

    Raises `PeerLost` if one of them does not come.
    """
    with ExitStack() as stack:
        port = stack.enter_context(Reservation(1)).ports[0]
        exchange = _exchange_of(world)
        told = exchange.all("address", [exchange.host, port])
        addresses = [f"{host}:{number}" for host, number in told]
        return Held(addresses, exchange, stack.pop_all())


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
    """The leader listens, and tells everybody what everybody has told it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.host = _bracketed(world.rendezvous.rpartition(":")[0].strip("[]"))
        self._stack = ExitStack()
        self._files: dict[int, IO[str]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        with _listener_of(world) as listener:
            listener.listen(world.size)
            listener.settimeout(1.0)
            while len(self._files) < world.size - 1:
                try:
                    one, _ = listener.accept()
                except TimeoutError:
                    _give_up_after(deadline, world, {0, *self._files})
                    continue
                one.settimeout(GREETING_S)
                file = self._stack.enter_context(self._stack.enter_context(one).makefile("rw"))
                with suppress(PeerLost, ValueError):  # somebody else, who says nothing of a rank
                    self._files[int(_line(file))] = file
                    one.settimeout(TIMEOUT_S)

    def all(self, word: str, own: Any) -> list[Any]:
        told = {rank: json.loads(_line(file)) for rank, file in self._files.items()}
        told[0] = own
        everything = [told[rank] for rank in range(self.world.size)]
        for file in self._files.values():
            with suppress(OSError):  # it has left: it does not want to hear it
                _tell(file, everything)
        return everything

    def close(self) -> None:
        with suppress(OSError):
            self._stack.close()


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
                self._socket = socket.create_connection(where, timeout=TIMEOUT_S)
                break
            except ConnectionError:
                _give_up_after(deadline, world, {world.rank})
                time.sleep(LOOK_S)
        self._file = self._socket.makefile("rw")
        self.host = _bracketed(str(self._socket.getsockname()[0]))
        _tell(self._file, world.rank)

    def all(self, word: str, own: Any) -> list[Any]:
        _tell(self._file, own)
        told: list[Any] = json.loads(_line(self._file))
        return told

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._socket.close()


def _tell(file: IO[str], what: Any) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def _line(file: IO[str]) -> str:
    try:
        line = file.readline()
    except OSError as error:
        raise PeerLost(f"another process went away while the ranks met: {error}") from error
    if not line.endswith("\n"):
        raise PeerLost("another process went away while the ranks met")
    return line


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _give_up_after(deadline: float, world: World, here: Collection[int]) -> None:
    if time.monotonic() > deadline:
        missing = sorted(set(range(world.size)) - set(here))
        raise PeerLost(f"ranks {missing} did not come within {TIMEOUT_S:.0f} s")
