"""Messages between a job's head and its nodes' agents: JSON, one TCP connection each.

Who connects proves that it knows the key of the job before it is told anything, and so does the
head to it: both answer the other's number with a keyed digest, and the key itself is never sent.
What follows is neither encrypted nor signed: it is as safe as the network between the nodes.
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
    """The other end is gone, or does not speak like one of ours."""


class Refused(Disconnected):
    """The other end does not know the key of this job, or has no place for this node."""


class HasFileno(Protocol):
    """Anything that can be waited for."""

    def fileno(self) -> int: ...


def wait_for(
    ready: Sequence[HasFileno], seconds: float, writable: Sequence[HasFileno] = ()
) -> None:
    """Until one of them can be read (or written), however many there are."""
    poller = select.poll()
    for one in ready:
        poller.register(one.fileno(), select.POLLIN)
    for one in writable:
        poller.register(one.fileno(), select.POLLIN | select.POLLOUT)
    poller.poll(1000 * seconds)


class Channel:
    """One end of a connection. Sending never waits; what the network does not take is kept."""

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
        """Whether there is something to send that the network has not taken yet."""
        return bool(self._out)

    def trust(self) -> None:
        """From now on messages may be large."""
        self._limit = LARGEST

    def send(self, message: Message) -> None:
        """Send what goes of a message, `flush` sends the rest; raises `Disconnected`."""
        data = json.dumps(message).encode()
        self._out += _HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what was left."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> list[Message]:
        """The messages that have come, without waiting; raises `Disconnected` at their end."""
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
        found = self._whole_messages()
        if over and not found:
            raise Disconnected(over)
        return found

    def _whole_messages(self) -> list[Message]:
        found = []
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
            found.append(message)
        return found

    def heard_nothing_for(self) -> float:
        """Seconds since anything came."""
        return time.monotonic() - self.heard_at

    def wait_for_one(self, seconds: float) -> Message:
        """The next message; raises `Disconnected` when none comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            self.flush()
            if found := self.receive():
                if len(found) > 1:
                    raise Disconnected("it spoke out of turn")
                return found[0]
            wait_for([] if self.is_behind else [self], remaining_s, [self] * self.is_behind)
        raise Disconnected(f"it said nothing for {seconds:g} s")

    def released(self) -> socket.socket:
        """The connection, for who goes on in frames of another kind; it is not of this any more."""
        return self._socket

    def close(self) -> None:
        with suppress(Disconnected):
            self.flush()
        self._socket.close()


def proof_of(key: bytes, who: str, mine: str, theirs: str) -> bytes:
    """HMAC of two nonces, which may be any text of a stranger's, under the key."""
    text = f"allranks {who} {mine} {theirs}".encode(errors="replace")
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def challenge(channel: Channel) -> str:
    """The head's part, first: send the nonce that a node has to answer."""
    nonce = secrets.token_hex(16)
    channel.send({"nonce": nonce})
    return nonce


def verify_proof(channel: Channel, key: bytes, nonce: str, answer: Message) -> None:
    """Verify that the node knows the key, and prove the same to it; raises `Refused`."""
    given, theirs = str(answer.get("proof", "")), str(answer.get("nonce", ""))
    if not hmac.compare_digest(_bytes(given), proof_of(key, "node", nonce, theirs)):
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


# --- admission -----------------------------------------------------------------------------------
# Admission of strangers' connections: each proves that it knows the key, or is dropped.
#
# Strangers cost no thread, and at most `MOST_PENDING` file descriptors or a quarter of those that
# the process may have: the others wait in the backlog of the listener. Each has `PENDING_S` for the
# whole proof. No error of a connection, and no lack of descriptors, ends the listening.


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
