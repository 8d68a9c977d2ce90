"""The network interfaces of this machine, and whether an address of another one answers."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

from allranks.errors import RequestError, nearest

SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915
IFF_UP, IFF_LOOPBACK = 0x1, 0x8
GREETING = b"allranks "


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its IPv4 address."""

    name: str
    address: str


def interfaces() -> tuple[Interface, ...]:
    """Those of this machine that are up and have an IPv4 address, without the loopback."""
    found = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no such address
                flags = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
                up = struct.unpack_from("H", flags, 16)[0]
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                if up & IFF_UP and not up & IFF_LOOPBACK:
                    found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
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
        self._callers: list[socket.socket] = []

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Greet all who ring; never waits."""
        with suppress(BlockingIOError):
            while True:
                caller, _ = self._socket.accept()
                self._callers.append(caller)
                with suppress(OSError):
                    caller.send(GREETING + self.token.encode())

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        for one in (*self._callers, self._socket):
            one.close()


def reached(addresses: Iterable[str], port: int, token: str, seconds: float) -> list[str]:
    """Those of a node's addresses at which it answers with its token, tried all at once."""
    expected, found = GREETING + token.encode(), []
    tried: dict[str, socket.socket] = {}
    for address in addresses:
        tried[address] = one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        one.setblocking(False)
        one.connect_ex((address, port))
    deadline = time.monotonic() + seconds
    while tried and time.monotonic() < deadline:
        for address, one in list(tried.items()):
            try:
                answer = one.recv(256)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno == 107:  # not connected yet
                    continue
                answer = b""
            if answer == expected:
                found.append(address)
            tried.pop(address).close()
        time.sleep(0.01)
    for one in tried.values():
        one.close()
    return found
