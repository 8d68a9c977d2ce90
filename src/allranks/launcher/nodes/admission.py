"""Admission of strangers' connections: each proves that it knows the key, or is dropped."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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

    @property
    def ready(self) -> list[HasFileno]:
        """What can be waited for: there is something to admit then."""
        return [self._listener, *(pending.channel for pending in self._pending)]

    def admit(self) -> Iterator[tuple[Channel, Message]]:
        """The channels that are trusted now, each with its first message. Never waits."""
        self._accept()
        for pending in list(self._pending):
            message = self._hear(pending)
            if message is not None:
                self._pending.remove(pending)
                yield pending.channel, message

    def _accept(self) -> None:
        """Accept connections as far as there is room; the others wait in the backlog."""
        self._listener.setblocking(False)
        with suppress(OSError):
            while len(self._pending) < MOST_PENDING:
                channel = Channel(self._listener.accept()[0])
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
