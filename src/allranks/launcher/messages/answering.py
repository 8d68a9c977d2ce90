"""Who answers peers: one thread admits them, one for each peer receives and answers, to its end.

A connection is a peer once it has proved that it knows the secret; before that it has no thread.

What all of them touch is touched while `changed` is held; who waits for another one waits there.
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
"""For so long a peer may move nothing of a message that it has begun."""


class Answering(ABC):
    """Peers that know the `secret`, each answered in a thread of its own.

    A body that comes has at most `most_bytes`.
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
        """Who a peer is that has said hello; answers it, or raises `Disconnected`."""

    @abstractmethod
    def answer(self, who: int, connection: Connection, message: Message, body: memoryview) -> None:
        """Answer a message; one without sense raises `ValueError`, `KeyError`, `TypeError`."""

    @abstractmethod
    def lost(self, who: int, connection: Connection, error: Exception) -> None:
        """A peer is gone; `who` is -1 for one that was never admitted."""

    def place(self, who: int, message: Message, size: int) -> memoryview:
        """Where the body of a message goes that comes from a peer, of so many bytes."""
        return memoryview(bytearray(size))

    def start(self) -> None:
        """From now on peers are answered."""
        self.begin(self._admit_peers)

    def begin(self, work: Callable[..., None], *args: Any) -> None:
        """Do `work` in a thread of its own, which `close` waits for."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Leave all peers, and wait for the threads."""
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
        """The bytes of all bodies that were sent so far (`sent`), and of all the rest."""
        with self.changed:
            there = self._there
            return {
                "sent": self._gone["sent"] + sum(peer.sent for peer in there),
                "control": self._gone["control"] + sum(peer.control for peer in there),
            }

    # --- threads --------------------------------------------------------------------------

    def _admit_peers(self) -> None:
        while not self.is_closed:
            wait_for(self._admission.ready, 0.2)
            for peer in self._admission.proved():
                try:
                    self.begin(self._serve, peer)
                except RuntimeError:  # no room for a thread just now: the peer comes again
                    peer.close()

    def _serve(self, peer: socket.socket) -> None:
        """One peer, from its first word to its end."""
        who = -1

        def place(message: Message, size: int) -> memoryview:
            return self.place(who, message, size)

        with Connection(peer, self._most, ANSWER_S) as connection:
            try:
                with self.changed:
                    self._there.add(connection)
                    if self.is_closed:
                        return
                hello, _ = connection.receive()
                who = self.admit(connection, hello)
                connection.waits_for_ever()
                while not self.is_closed:
                    self.answer(who, connection, *connection.receive(place))
            except (ValueError, KeyError, TypeError) as error:  # it speaks another language
                with suppress(Disconnected):
                    connection.send({"refused": f"{type(error).__name__}: {error}"})
                self.lost(who, connection, error)
            except Disconnected as error:
                self.lost(who, connection, error)
            finally:
                self._count(connection)

    def _count(self, connection: Connection) -> None:
        with self.changed:
            self._there.discard(connection)
            self._gone["sent"] += connection.sent
            self._gone["control"] += connection.control
