"""How processes outside any process group find rank 0, which serves them.

On one machine rank 0 listens at a loopback port and writes it into the file of the attempt; on
several nodes it listens at the address that the launcher gave it. A restarted process finds it the
same way.
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
    """The socket at which the others find this process; rank 0 calls it, also after a restart."""
    if not world.rendezvous:
        local = socket.create_server((LOCALHOST, 0), backlog=256)
        _write(Path(world.store), local.getsockname()[1])
        return local
    if world.listener >= 0:
        inherited = socket.socket(fileno=os.dup(world.listener))
        inherited.listen(256)
        return inherited
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
    """A connection to rank 0; `alive` is called between attempts. Raises `PeerLost` if rank 0 does
    not answer within `patience_s`, or does not know the secret of the job."""
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
    """A connection to this address, after both ends have proved that they know the secret.

    Raises `OSError` if nothing listens there, `Refused` or `Disconnected`.
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
    """Write the port atomically: a reader never sees half of it."""
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(json.dumps({"port": port}))
    new.replace(path)
