"""A server of peers: one thread admits them, and one thread for each peer answers its messages.

A connection gets a thread once it has proved that it knows the secret.

The condition `changed` protects shared state; threads wait on it for each other.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from allranks.launcher.messages.connection import Connection
from allranks.launcher.nodes.channel import Admission, Disconnected, Message, wait_for

ANSWER_S = 120.0
"""How long a peer may stall in the midst of a message."""


class Answering(ABC):
    """Serves peers that know the `secret`, each in its own thread.

    A received body has at most `most_bytes`.
    """

    def __init__(self, listener: socket.socket, secret: str, most_bytes: int) -> None:
        self._listener, self._most = listener, most_bytes
        self._admission = Admission(listener, secret)
        self.changed = threading.Condition()
        self.is_closed = False
        self._there: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._gone = {"sent": 0, "control": 0}

    @abstractmethod
    def admit(self, connection: Connection, hello: Message) -> int:
        """Answer a peer's hello, and return the peer's number; or raise `Disconnected`."""

    @abstractmethod
    def answer(self, peer: int, connection: Connection, message: Message, body: memoryview) -> None:
        """Answer a message; raises `ValueError`, `KeyError` or `TypeError` for an invalid one."""

    @abstractmethod
    def lost(self, peer: int, connection: Connection, error: Exception) -> None:
        """A peer is gone; `peer` is -1 for one that was never admitted."""

    def place(self, peer: int, message: Message, size: int) -> memoryview:
        """The memory that receives the body of a peer's message, of `size` bytes."""
        return memoryview(bytearray(size))

    def start(self) -> None:
        """Start to serve peers."""
        self.begin(self._admit_peers)

    def begin(self, work: Callable[..., None], *args: Any) -> None:
        """Run `work` in a thread; `close` waits for it."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Disconnect all peers, and wait for the threads."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
            peers = list(self._there)
        for peer in peers:
            peer.shut()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()
        self._admission.close()
        self._listener.close()

    def sent_bytes(self) -> dict[str, int]:
        """The bytes of all bodies that were sent so far (`sent`), and of all headers."""
        with self.changed:
            there = self._there
            return {
                "sent": self._gone["sent"] + sum(peer.sent_bytes for peer in there),
                "control": self._gone["control"] + sum(peer.control for peer in there),
            }

    # --- threads --------------------------------------------------------------------------

    def _admit_peers(self) -> None:
        while not self.is_closed:
            wait_for(self._admission.ready, 0.2)
            for peer in self._admission.proved():
                try:
                    self.begin(self._serve, peer)
                except RuntimeError:  # no thread can start now: the peer tries again
                    peer.close()

    def _serve(self, peer: socket.socket) -> None:
        """Serve one peer until it leaves."""
        number = -1

        def place(message: Message, size: int) -> memoryview:
            return self.place(number, message, size)

        with Connection(peer, self._most, ANSWER_S) as connection:
            try:
                with self.changed:
                    self._there.add(connection)
                    if self.is_closed:
                        return
                hello, _ = connection.receive()
                number = self.admit(connection, hello)
                connection.waits_for_ever()
                while not self.is_closed:
                    self.answer(number, connection, *connection.receive(place))
            except (ValueError, KeyError, TypeError) as error:  # an invalid message
                with suppress(Disconnected):
                    connection.send({"refused": f"{type(error).__name__}: {error}"})
                self.lost(number, connection, error)
            except Disconnected as error:
                self.lost(number, connection, error)
            finally:
                self._count(connection)

    def _count(self, connection: Connection) -> None:
        with self.changed:
            self._there.discard(connection)
            self._gone["sent"] += connection.sent_bytes
            self._gone["control"] += connection.control
