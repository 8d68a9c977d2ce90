"""Admission of strangers' connections: each proves that it knows the key, or is dropped.

Strangers cost no thread, and at most `MOST_PENDING` file descriptors or a quarter of those that the
process may have: the others wait in the backlog of the listener. Each has `PENDING_S` for the whole
proof. No error of a connection, and no lack of descriptors, ends the listening.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from allranks.launcher.nodes.channel import (
    Channel,
    Disconnected,
    HasFileno,
    Message,
    Refused,
    challenge,
    verify_proof,
)

PENDING_S = 10.0
MOST_PENDING = 256
PAUSE_S = 0.1
"""After an error of the listener itself, which stays readable: too many open files."""


@dataclass
class _Pending:
    """A connection that has not said yet whose it is."""

    channel: Channel
    nonce: str
    since: float
    trusted: bool = False


class Admission:
    """The connections at `listener`. `on_refused` is called for each that gives a wrong proof."""

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener, self._key, self._on_refused = listener, key.encode(), on_refused
        self._pending: list[_Pending] = []
        self._most = min(MOST_PENDING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._accepts_from = 0.0

    @property
    def _has_room(self) -> bool:
        return len(self._pending) < self._most and time.monotonic() >= self._accepts_from

    @property
    def ready(self) -> list[HasFileno]:
        """What can be waited for: there is something to admit then."""
        listener = [self._listener] if self._has_room else []
        return [*listener, *(pending.channel for pending in self._pending)]

    def admit(self) -> Iterator[tuple[Channel, Message]]:
        """The channels that are trusted now, each with its first message. Never waits."""
        self._accept()
        for pending in list(self._pending):
            message = self._hear(pending)
            if message is not None:
                self._pending.remove(pending)
                yield pending.channel, message

    def proved(self) -> Iterator[socket.socket]:
        """The connections that are trusted now, for who goes on in frames of another kind."""
        self._accept()
        for pending in list(self._pending):
            self._hear(pending)
            if pending.trusted:
                self._pending.remove(pending)
                yield pending.channel.released()

    def _accept(self) -> None:
        """Accept connections as far as there is room; the others wait in the backlog."""
        self._listener.setblocking(False)
        while self._has_room:
            try:
                channel = Channel(self._listener.accept()[0])
            except BlockingIOError:
                return
            except ConnectionError:  # it has left the backlog
                continue
            except OSError:
                self._accepts_from = time.monotonic() + PAUSE_S
                return
            try:
                self._pending.append(_Pending(channel, challenge(channel), time.monotonic()))
            except Disconnected:
                channel.close()

    def _hear(self, pending: _Pending) -> Message | None:
        """What it says after its proof; one without a proof in time is dropped."""
        try:
            for message in pending.channel.receive():
                if pending.trusted:
                    return message
                verify_proof(pending.channel, self._key, pending.nonce, message)
                pending.trusted = True
        except Refused:
            self._on_refused()
            self._drop(pending)
            return None
        except Disconnected:
            self._drop(pending)
            return None
        if not pending.trusted and time.monotonic() - pending.since > PENDING_S:
            self._drop(pending)
        return None

    def _drop(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        pending.channel.close()

    def close(self) -> None:
        """Close all that are not admitted yet."""
        for pending in self._pending:
            pending.channel.close()
        self._pending.clear()
