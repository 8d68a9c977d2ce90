"""The network interfaces of this machine, and whether an address of another one answers."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from allranks.errors import RequestError, nearest

GREETING = b"allranks "
MOST_AT_ONCE = 256


@dataclass(frozen=True)
class Interface:
    """A network interface that is up: its IPv4 address, and the speed that its driver tells."""

    name: str
    address: str
    speed_mbit: int | None = field(default=None, compare=False)


def interfaces() -> tuple[Interface, ...]:
    """Those of this machine that are up and have an IPv4 address, without the loopback."""
    addresses, found = psutil.net_if_addrs(), []
    for name, state in psutil.net_if_stats().items():
        flags = state.flags.split(",")
        own = [one.address for one in addresses.get(name, ()) if one.family == socket.AF_INET]
        if own and "up" in flags and "loopback" not in flags:
            found.append(Interface(name, own[0], state.speed or None))
    return tuple(found)


def candidates(first: str, wanted: str = "") -> tuple[Interface, ...]:
    """The interfaces by which other nodes may reach this one, the address `first` before others.

    With `wanted` it is the one of that name; raises `RequestError` if there is none.
    """
    there = interfaces()
    if wanted:
        named = tuple(one for one in there if one.name == wanted)
        if not named:
            raise RequestError(
                asked=f"--interface {wanted}",
                found=f"no interface of that name on {socket.gethostname()} that is up",
                why="the ranks of all nodes meet over this interface",
                do=nearest(wanted, [one.name for one in there]),
            )
        return named
    if first.startswith("127."):  # nodes on one machine
        return (Interface("lo", first),)
    return tuple(sorted(there, key=lambda one: one.address != first))


class Doorbell:
    """A port of this node at which others ring, to see by which of its addresses they reach it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._socket = socket.create_server(("0.0.0.0", 0))
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Greet all who ring; never waits."""
        with suppress(OSError):
            for _ in range(MOST_AT_ONCE):  # whoever rings without end keeps nobody from working
                caller = self._socket.accept()[0]
                with caller, suppress(OSError):
                    caller.send(GREETING + self.token.encode())

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Ringing:
    """Rings at all addresses of other nodes at once; `bells`: name -> (addresses, port, token)."""

    def __init__(self, bells: Mapping[str, tuple[Sequence[str], int, str]], seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self.found: dict[str, list[str]] = {name: [] for name in bells}
        self._tried: dict[tuple[str, str], socket.socket] = {}
        self._expected = {name: GREETING + token.encode() for name, (_, _, token) in bells.items()}
        for name, (addresses, port, _) in bells.items():
            for address in addresses:
                one = self._tried[name, address] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                one.setblocking(False)
                one.connect_ex((address, port))

    def is_over(self) -> bool:
        """Look who has answered; true when nobody is waited for any more. Never waits."""
        for (name, address), one in list(self._tried.items()):
            try:
                answer = one.recv(256)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOTCONN):
                    continue
                answer = b""
            if answer == self._expected[name]:
                self.found[name].append(address)
            self._tried.pop((name, address)).close()
        if self._tried and time.monotonic() < self._deadline:
            return False
        self.close()
        return True

    def close(self) -> None:
        for one in self._tried.values():
            one.close()
        self._tried.clear()
