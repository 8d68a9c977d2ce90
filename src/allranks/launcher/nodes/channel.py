"""Messages between a job's head and its nodes' agents: JSON, one TCP connection each.

A node proves that it knows the key of the job before it gets any message, and so does the head:
each answers the other's nonce with a keyed digest. The key itself is never sent. The messages that
follow are neither encrypted nor signed: they are as safe as the network between the nodes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

LARGEST = 1 << 24
LARGEST_FROM_STRANGERS = 1 << 12
MEET_S = 10.0
_HEADER = struct.Struct("!I")
Message = dict[str, Any]


class Disconnected(ConnectionError):
    """The other end is gone, or does not follow this protocol."""


class Refused(Disconnected):
    """The other end does not know the key of this job, or has no place for this node."""


class HasFileno(Protocol):
    """Anything that can be waited for."""

    def fileno(self) -> int: ...


def wait_for(
    ready: Sequence[HasFileno], seconds: float, writable: Sequence[HasFileno] = ()
) -> None:
    """Wait until one of them can be read (or written); there is no limit on their number."""
    poller = select.poll()
    for waitable in ready:
        poller.register(waitable.fileno(), select.POLLIN)
    for waitable in writable:
        poller.register(waitable.fileno(), select.POLLIN | select.POLLOUT)
    poller.poll(1000 * seconds)


class Channel:
    """One end of a connection. Sending never blocks; unsent bytes are buffered."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._limit = LARGEST_FROM_STRANGERS
        self._in, self._out = bytearray(), bytearray()
        self.heard_at = time.monotonic()
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """The address of this end, as the other one reaches it."""
        return str(self._socket.getsockname()[0])

    @property
    def is_behind(self) -> bool:
        """Whether unsent bytes are buffered."""
        return bool(self._out)

    def trust(self) -> None:
        """Allow large messages from now on."""
        self._limit = LARGEST

    def send(self, message: Message) -> None:
        """Send a message without blocking, `flush` sends the remainder; raises `Disconnected`."""
        data = json.dumps(message).encode()
        self._out += _HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send buffered bytes without blocking."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> list[Message]:
        """The messages received so far, without waiting; raises `Disconnected` after the last."""
        over: str = ""
        try:
            while len(self._in) <= self._limit + _HEADER.size:
                part = self._socket.recv(1 << 16)
                if not part:
                    over = "it closed its connection"
                    break
                self._in += part
                self.heard_at = time.monotonic()
        except BlockingIOError:
            pass
        except OSError as error:
            over = f"its connection broke: {error}"
        messages = self._whole_messages()
        if over and not messages:
            raise Disconnected(over)
        return messages

    def _whole_messages(self) -> list[Message]:
        messages = []
        while len(self._in) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._in)
            if length > self._limit:
                raise Disconnected("it sent what is no message of ours")
            end = _HEADER.size + length
            if len(self._in) < end:
                break
            try:
                message = json.loads(bytes(self._in[_HEADER.size : end]))
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise Disconnected("it sent what is no message of ours")
            del self._in[:end]
            messages.append(message)
        return messages

    def silent_s(self) -> float:
        """Seconds since the last byte came."""
        return time.monotonic() - self.heard_at

    def wait_for_one(self, seconds: float) -> Message:
        """The next message; raises `Disconnected` when none comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            self.flush()
            if messages := self.receive():
                if len(messages) > 1:
                    raise Disconnected("it spoke out of turn")
                return messages[0]
            wait_for([] if self.is_behind else [self], remaining_s, [self] * self.is_behind)
        raise Disconnected(f"it said nothing for {seconds:g} s")

    def released(self) -> socket.socket:
        """Release the connection to another protocol; this channel is not used afterwards."""
        return self._socket

    def close(self) -> None:
        with suppress(Disconnected):
            self.flush()
        self._socket.close()


def proof_of(key: bytes, role: str, mine: str, theirs: str) -> bytes:
    """HMAC of two nonces under the key; a stranger's nonce may be any text."""
    text = f"allranks {role} {mine} {theirs}".encode(errors="replace")
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def challenge(channel: Channel) -> str:
    """The head's part, first: send the nonce that a node has to sign."""
    nonce = secrets.token_hex(16)
    channel.send({"nonce": nonce})
    return nonce


def verify_proof(channel: Channel, key: bytes, nonce: str, answer: Message) -> None:
    """Verify that the node knows the key, and prove the same to it; raises `Refused`."""
    proof, theirs = str(answer.get("proof", "")), str(answer.get("nonce", ""))
    if not hmac.compare_digest(_bytes(proof), proof_of(key, "node", nonce, theirs)):
        channel.send({"refused": "it is not of this job: the id is another"})
        raise Refused("it does not know the id of this job")
    channel.trust()
    channel.send({"proof": proof_of(key, "head", nonce, theirs).decode()})


def authenticate(channel: Channel, key: bytes) -> None:
    """The node's part: prove that it knows the key, and verify that the head does."""
    nonce = secrets.token_hex(16)
    challenge = str(channel.wait_for_one(MEET_S).get("nonce", ""))
    channel.send({"nonce": nonce, "proof": proof_of(key, "node", challenge, nonce).decode()})
    answer = channel.wait_for_one(MEET_S)
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    proof = proof_of(key, "head", challenge, nonce)
    if not hmac.compare_digest(_bytes(str(answer.get("proof", ""))), proof):
        raise Refused("whoever listens there does not know the id of this job")
    channel.trust()


def connected(where: tuple[str, int], key: str, timeout_s: float) -> Channel:
    """A channel to this address, after mutual proof; raises `OSError` or `Disconnected`."""
    channel = Channel(socket.create_connection(where, timeout_s))
    try:
        authenticate(channel, key.encode())
    except BaseException:
        channel.close()
        raise
    return channel


# --- admission -----------------------------------------------------------------------------------
# Admission of new connections: each proves that it knows the key, or is dropped.
#
# Pending connections need no thread, and at most `MOST_PENDING` file descriptors or a quarter of
# the process's limit: the others wait in the backlog of the listener. Each has `PENDING_S` for its
# proof. Neither an error of a connection nor a lack of descriptors ends the listening.


PENDING_S = 10.0
MOST_PENDING = 256
PAUSE_S = 0.1
"""After an error of the listener itself, which stays readable: too many open files."""


@dataclass
class _Pending:
    """A connection that is not authenticated yet."""

    channel: Channel
    nonce: str
    since: float
    trusted: bool = False


class Admission:
    """Admits connections at `listener`; calls `on_refused` for each that gives a wrong proof."""

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
        """The sockets to wait for before calling `admit`."""
        listener = [self._listener] if self._has_room else []
        return [*listener, *(pending.channel for pending in self._pending)]

    def admit(self) -> Iterator[tuple[Channel, Message]]:
        """The channels that are trusted now, each with its first message. Never blocks."""
        self._accept()
        for pending in list(self._pending):
            message = self._first_message(pending)
            if message is not None:
                self._pending.remove(pending)
                yield pending.channel, message

    def proved(self) -> Iterator[socket.socket]:
        """The connections that are trusted now, released to another protocol."""
        self._accept()
        for pending in list(self._pending):
            self._first_message(pending)
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

    def _first_message(self, pending: _Pending) -> Message | None:
        """The first message after the proof, if it has come; drop it without a proof in time."""
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
