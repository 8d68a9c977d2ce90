"""Where processes of a job that are in no group find the one that serves them, again and again.

On one machine it listens at a port of the loopback that it writes into the file of the attempt; on
several nodes at the address that the launcher gave to rank 0. Who comes back after a restart finds
it the same way, so nobody has to be told anew.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from allranks.errors import PeerLost
from allranks.launcher.messages.connection import Connection
from allranks.launcher.nodes.channel import Channel, Disconnected, Refused, authenticate
from allranks.launcher.world import World

LOOK_S = 0.05
CONNECT_S = 5.0
LOCALHOST = "127.0.0.1"


def listen(world: World) -> socket.socket:
    """A socket at the place where the others look; rank 0 calls this, again after a restart."""
    if not world.rendezvous:
        found = socket.create_server((LOCALHOST, 0), backlog=256)
        _write(Path(world.store), found.getsockname()[1])
        return found
    if world.listener >= 0:
        given = socket.socket(fileno=os.dup(world.listener))
        given.listen(256)
        return given
    host, _, port = world.rendezvous.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=256)


def connect(
    world: World,
    most_bytes: int,
    timeout_s: float,
    patience_s: float,
    alive: Callable[[], None] = lambda: None,
) -> Connection:
    """Rank 0, once it answers; `alive` is called between attempts. Raises `PeerLost` if it does
    not within `patience_s`, or if it does not know the secret of the job."""
    deadline, problem = time.monotonic() + patience_s, "it has not said where it listens"
    while True:
        try:
            where = _address(world)
            if where is not None:
                return connect_to(where, world.secret, most_bytes, timeout_s)
        except Refused as error:
            raise PeerLost(f"rank 0 refuses this process: {error}") from error
        except (OSError, Disconnected) as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise PeerLost(f"rank 0 did not answer for {patience_s:g} s: {problem}")
        alive()
        time.sleep(LOOK_S)


def connect_to(
    where: tuple[str, int], secret: str, most_bytes: int, timeout_s: float
) -> Connection:
    """Who listens there, once both have proved that they know the secret.

    Raises `OSError` where nobody does, `Refused` or `Disconnected`.
    """
    channel = Channel(socket.create_connection(where, CONNECT_S))
    try:
        authenticate(channel, secret.encode())
    except BaseException:
        channel.close()
        raise
    return Connection(channel.released(), most_bytes, timeout_s)


def _address(world: World) -> tuple[str, int] | None:
    if world.rendezvous:
        host, _, port = world.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)
    try:
        return LOCALHOST, int(json.loads(Path(world.store).read_text())["port"])
    except FileNotFoundError:
        return None


def _write(path: Path, port: int) -> None:
    """The port, whole or not yet: who reads it never sees a half."""
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(json.dumps({"port": port}))
    new.replace(path)
