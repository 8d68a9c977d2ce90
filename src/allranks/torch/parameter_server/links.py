"""A connection to each server: of the scheduler, which leads them, and of a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from allranks.launcher.messages.answering import ANSWER_S
from allranks.launcher.messages.connection import Buffer, Connection
from allranks.launcher.messages.meeting_point import connect_to
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.torch.parameter_server.server import KEPT

Address = tuple[str, int]


class Stale(Disconnected):
    """The servers have other weights than those that this worker went on from."""


class CalledBack(Exception):
    """There is work that comes before the weights that this worker waits for."""


class Links:
    """The servers at these addresses, in order. What goes wrong is `Disconnected`."""

    def __init__(self, addresses: Sequence[Address], secret: str, nbytes: Sequence[int]) -> None:
        self._addresses, self._secret = list(addresses), secret
        self._most = [(1 + KEPT) * size + (1 << 20) for size in nbytes]
        self.servers: list[Connection] = []
        self.shares: list[bool] = []

    def open(self, hello: Message, offers: Sequence[Message] = ()) -> Self:
        """Connect to all, and say hello; `offers` are of memory to share, one for each.

        `shares` says of each server afterwards whether it shares that memory.
        """
        self.shares = []
        for number, where in enumerate(self._addresses):
            with naming(number):
                try:
                    made = connect_to(where, self._secret, self._most[number], ANSWER_S)
                except OSError as error:
                    raise Disconnected(str(error)) from error
                self.servers.append(made)
                answer, _ = made.ask({**hello, "memory": offers[number]} if offers else hello)
                self.shares.append(bool(answer["memory"]))
                made.waits_for_ever()
        return self

    def send(self, server: int, message: Message, *body: Buffer) -> None:
        with naming(server):
            self.servers[server].send(message, *body)

    def receive(self, server: int) -> tuple[Message, memoryview]:
        """The answer of one server; raises `Disconnected` for one that refuses, too."""
        with naming(server):
            answer, size = self._header(server)
            body = memoryview(bytearray(size))
            self.servers[server].receive_body(body)
            return answer, body

    def header(self, server: int) -> tuple[Message, int]:
        """The next answer of a server, and the bytes of its body, which `fill` is to receive."""
        with naming(server):
            return self._header(server)

    def _header(self, server: int) -> tuple[Message, int]:
        answer, size = self.servers[server].receive_header()
        if "refused" in answer:
            raise Disconnected(f"it refuses: {answer['refused']}")
        return answer, size

    def fill(self, server: int, memory: memoryview) -> None:
        """Receive the body of the answer whose header came last."""
        with naming(server):
            self.servers[server].receive_body(memory)

    def ask_all(
        self, message: Message, bodies: Sequence[Sequence[Buffer]] = ()
    ) -> list[tuple[Message, memoryview]]:
        """Say the same to all, with a body of its own for each, and wait for all answers."""
        self.say_to_all(message, bodies)
        return self.hear_all()

    def say_to_all(self, message: Message, bodies: Sequence[Sequence[Buffer]] = ()) -> None:
        """Say the same to all, with a body of its own for each; their answers come later."""
        for server in range(len(self.servers)):
            self.send(server, message, *(bodies[server] if bodies else ()))

    def hear_all(self) -> list[tuple[Message, memoryview]]:
        """What all answer to the first thing said that they have not answered yet."""
        return [self.receive(server) for server in range(len(self.servers))]

    def shut(self) -> None:
        """From any thread: who waits for a server hears that it is gone."""
        for connection in self.servers:
            connection.shut()

    def close(self) -> None:
        for connection in self.servers:
            connection.close()
        self.servers = []


@contextmanager
def naming(server: int) -> Iterator[None]:
    """Within, a connection that breaks says which server's it is."""
    try:
        yield
    except Disconnected as error:
        raise Disconnected(f"server {server}: {error}") from error
