"""The connections of the scheduler, or of a worker, to all servers; the memory shared with one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from allranks.launcher.messages import ANSWER_S, Buffer, Connection, Place, connect_to, new_memory
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.torch.parameter_server.flat import ALIGNED, FlatLayout
from allranks.torch.shared_memory.segment import Segment, host_identity

Address = tuple[str, int]
MAX_STATES = 16
"""The optimizer state has at most so many times the bytes of the weights."""
NAME = "allranks-parameter-server"


class Stale(Disconnected):
    """The servers have loaded other weights since this worker joined."""


def largest_message(nbytes: int) -> int:
    """The largest message about `nbytes` of weights: with them the optimizer state."""
    return (1 + MAX_STATES) * nbytes + (1 << 20)


class Links:
    """The servers at these addresses, in order. Failures raise `Disconnected`."""

    def __init__(self, addresses: Sequence[Address], secret: str, nbytes: Sequence[int]) -> None:
        self._addresses, self._secret = list(addresses), secret
        self._most = [largest_message(size) for size in nbytes]
        self.servers: list[Connection] = []
        self.shares: list[bool] = []

    def open(self, hello: Message, offers: Sequence[Message] = ()) -> Self:
        """Connect to all servers; `offers` has an offer of shared memory for each.

        Afterwards `shares` says for each server whether it accepted.
        """
        self.shares = []
        for number, where in enumerate(self._addresses):
            with naming(number):
                try:
                    connection = connect_to(where, self._secret, self._most[number], ANSWER_S)
                except OSError as error:
                    raise Disconnected(str(error)) from error
                self.servers.append(connection)
                answer, _ = connection.ask({**hello, "memory": offers[number]} if offers else hello)
                self.shares.append(bool(answer["memory"]))
                connection.waits_for_ever()
        return self

    def send(self, server: int, message: Message, *body: Buffer) -> None:
        with naming(server):
            self.servers[server].send(message, *body)

    def receive(self, server: int, place: Place = new_memory) -> tuple[Message, memoryview]:
        """The answer of one server, its body in the memory which `place` returns for it.

        Raises `Disconnected` also if it refuses, and `Stale`.
        """
        with naming(server):
            answer, body = self.servers[server].receive(place)
            if "refused" in answer:
                raise Disconnected(f"it refuses: {answer['refused']}")
        if "stale" in answer:
            raise Stale(f"server {server} has been loaded anew")
        return answer, body

    def send_to_all(self, message: Message, bodies: Sequence[Buffer] = ()) -> None:
        """Send a message to all servers, with one body for each; does not wait."""
        for server in range(len(self.servers)):
            self.send(server, message, *bodies[server : server + 1])

    def receive_all(self) -> list[tuple[Message, memoryview]]:
        """The answers of all servers to the oldest message without an answer."""
        return [self.receive(server) for server in range(len(self.servers))]

    def shut(self) -> None:
        """Break the connections, from any thread; a blocked call raises `Disconnected`."""
        for connection in self.servers:
            connection.shut()

    def close(self) -> None:
        for connection in self.servers:
            connection.close()
        self.servers = []


@contextmanager
def naming(server: int) -> Iterator[None]:
    """Within, the message of `Disconnected` names the server."""
    try:
        yield
    except Disconnected as error:
        raise Disconnected(f"server {server}: {error}") from error


class SharedNumbers:
    """Memory that a worker and a server of one host share: what is pushed and pulled is there.

    The worker creates it and sends the server its path; later messages only say that the numbers
    are there. A worker writes its next gradient only after its pull, and a server answers the
    messages of one worker in order, so nothing is read while it changes.

        | the gradient: written by the worker, summed by the server | the weights: by the server |
    """

    def __init__(self, layout: FlatLayout, segment: Segment) -> None:
        memory: Any = (ctypes.c_ubyte * segment.nbytes).from_address(segment.address)
        memory.segment = segment  # mapped as long as a tensor lies there
        half, whole = segment.nbytes // 2, memoryview(memory).cast("B")
        self._segment = segment
        self.gradient, self.weights = layout.new(whole[:half]), layout.new(whole[half:])

    @classmethod
    def offer(cls, layout: FlatLayout) -> tuple[SharedNumbers | None, Message]:
        """New memory for a server of this host, and how to open it; `hide` it once that is done."""
        host = host_identity()
        if not host:
            return None, {}
        try:
            segment = Segment.create(_size_of(layout), NAME)
        except OSError:
            return None, {}
        return cls(layout, segment), {"host": host, "where": segment.where}

    @classmethod
    def open(cls, layout: FlatLayout, offer: Message) -> SharedNumbers | None:
        """The memory of a worker's offer; `None` where it is on another host, or out of reach."""
        if not offer.get("host") or offer["host"] != host_identity():
            return None
        try:
            return cls(layout, Segment.open(str(offer["where"]), _size_of(layout)))
        except (OSError, ValueError):
            return None

    def hide(self) -> None:
        """Unlink the memory, so that no other process can open it."""
        self._segment.hide()


def _size_of(layout: FlatLayout) -> int:
    return 2 * -(-max(1, layout.nbytes) // ALIGNED) * ALIGNED
