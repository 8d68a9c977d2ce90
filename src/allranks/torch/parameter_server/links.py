"""The connections of the scheduler, or of a worker, to all servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from allranks.launcher.messages.answering import ANSWER_S
from allranks.launcher.messages.connection import Buffer, Connection, Place, new_memory
from allranks.launcher.messages.meeting_point import connect_to
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.torch.parameter_server.server import MAX_STATES

Address = tuple[str, int]


class Stale(Disconnected):
    """The servers have loaded other weights since this worker joined."""


class Links:
    """The servers at these addresses, in order. Failures raise `Disconnected`."""

    def __init__(self, addresses: Sequence[Address], secret: str, nbytes: Sequence[int]) -> None:
        self._addresses, self._secret = list(addresses), secret
        self._most = [(1 + MAX_STATES) * size + (1 << 20) for size in nbytes]
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

        Raises `Disconnected` also if it refuses.
        """
        with naming(server):
            answer, body = self.servers[server].receive(place)
            if "refused" in answer:
                raise Disconnected(f"it refuses: {answer['refused']}")
            return answer, body

    def ask_all(
        self, message: Message, bodies: Sequence[Sequence[Buffer]] = ()
    ) -> list[tuple[Message, memoryview]]:
        """Send a message to all servers, with one body for each, and wait for all answers."""
        self.send_to_all(message, bodies)
        return self.receive_all()

    def send_to_all(self, message: Message, bodies: Sequence[Sequence[Buffer]] = ()) -> None:
        """Send a message to all servers, with one body for each; does not wait."""
        for server in range(len(self.servers)):
            self.send(server, message, *(bodies[server] if bodies else ()))

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
