"""Ports that a job owns: bound before its processes start, and held until they are gone.

To look for a free port and to bind it later is a race that two jobs lose. Here each port is bound
and never listens: the kernel then gives it to nobody who asks for any port, while a server that
sets SO_REUSEADDR, as those of torch, gRPC and JAX do, binds that very port and listens. A script
whose own server does not set it is refused by the kernel ("Address already in use").

Each port is held by a name too, which only one process of a machine (of a network namespace) can
have and which goes when its owner dies, however it dies: two jobs that are told the same number do
not both get it.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import Any, Self

from allranks.errors import PlaceError, RequestError

MOST_TRIES = 100
NAME = "\0allranks-port-{}"


class Reservation:
    """`count` ports of this machine, from `first` on if that is not 0, held until `close`.

    `address` is one that the processes of the job will be reached at: it must be this machine's.
    The ports are free on all addresses, because some servers take no other than all. Raises
    `RequestError` for an address that is not here and for a port that is taken, and `PlaceError`
    if the machine has no more.
    """

    def __init__(self, count: int, address: str = "127.0.0.1", first: int = 0) -> None:
        _must_be_here(address)
        with ExitStack() as stack:
            ports = [_hold(stack, first)] if first else []
            while len(ports) < count:
                ports.append(_hold_any(stack))
            self.ports = tuple(ports)
            self._held = stack.pop_all()

    def close(self) -> None:
        """Give the ports back; servers that listen at them are not disturbed."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _must_be_here(address: str) -> None:
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except (OSError, UnicodeError) as error:
        raise RequestError(
            asked=f"the processes of this job to meet at {address}",
            found=str(error),
            why=f"rank 0 listens there, and it runs on {socket.gethostname()}",
            do="name an address of the first node, or none: on one node 127.0.0.1 is taken",
        ) from None


def _hold_any(stack: ExitStack) -> int:
    """A port that the kernel chose, held."""
    for _ in range(MOST_TRIES):
        try:
            first = stack.enter_context(_bound(0))
        except OSError as error:
            raise PlaceError(f"this machine has no port left for a job: {error}") from error
        port = int(first.getsockname()[1])
        try:
            stack.enter_context(_named(port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue  # reserved by name for another job, which binds it in a moment
        return port
    raise PlaceError(f"{MOST_TRIES} ports in a row were held by other jobs")


def _hold(stack: ExitStack, port: int) -> int:
    """Reserve this port; raises `RequestError` if it is in use."""
    try:
        stack.enter_context(_named(port))
        stack.enter_context(_bound(port))
    except (OSError, OverflowError) as error:
        raise RequestError(
            asked=f"port {port}",
            found=str(error),
            why="a port belongs to one job, from its start to its end",
            do="leave the port away, and one that is free is taken",
        ) from None
    return port


def _bound(port: int) -> socket.socket:
    """A socket bound to a port of all addresses that does not listen."""
    if socket.has_dualstack_ipv6():
        server = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bound_to(server, ("", port))


def _named(port: int) -> socket.socket:
    """The name of a port, as a socket of which there is one: in no folder, gone with its owner."""
    return _bound_to(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), NAME.format(port))


def _bound_to(unbound: socket.socket, where: Any) -> socket.socket:
    try:
        unbound.bind(where)
    except BaseException:
        unbound.close()
        raise
    return unbound
