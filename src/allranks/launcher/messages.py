"""One end of a connection between two processes of a job: frames of a header and raw bytes.

    | "AR" 1 2 | bytes of the header: u32 | bytes of the body: u64 | header: JSON | body: as it is |

Both ends have proved before that they know the secret of the job, as a head and its agents do
(`nodes.channel`). Sizes are bounded by what the receiver expects. The frames are neither encrypted
nor signed: they are as safe as the network.

The kernel detects a lost peer: at once if its process ended, and by TCP's probes after `SILENT_S`
if its link is cut. Every failure is `Disconnected` or `Refused`. Only one thread may use a
connection at a time. Used by `torch/elastic`; it knows no framework.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from allranks.errors import PeerLost
from allranks.launcher.nodes.channel import (
    Admission,
    Disconnected,
    Message,
    Refused,
    connected,
    wait_for,
)
from allranks.launcher.world import World

MARK = b"AR\x01\x02"
LARGEST_HEADER = 1 << 20
SILENT_S = 30.0
AHEAD = 1 << 12
"""Bytes received at once: a header comes with its sizes, and with a small body."""
_START = struct.Struct("!4sIQ")
_PROBES = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 5))

Buffer = bytes | bytearray | memoryview
Place = Callable[[Message, int], memoryview]
"""Where the body of a message goes, of so many bytes."""


def new_memory(_: Message, size: int) -> memoryview:
    """The default: memory of its own for each body."""
    return memoryview(bytearray(size))


class Connection:
    """Frames to and from one peer, of which a body has at most `most_bytes`.

    A call that moves no byte for `timeout_s` raises `Disconnected`. `sent_bytes` and `received` are
    the bytes of all bodies so far, `control` the bytes of all headers that were sent.
    """

    def __init__(self, peer: socket.socket, most_bytes: int, timeout_s: float) -> None:
        self._socket, self._most, self.timeout_s = peer, most_bytes, timeout_s
        self._ahead, self._came = memoryview(bytearray(AHEAD)), memoryview(b"")
        self.newest_version = -1
        """For a server: the newest version that it sent to this peer."""
        self.sent_bytes = self.received = self.control = 0
        peer.settimeout(timeout_s)
        if peer.family in (socket.AF_INET, socket.AF_INET6):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES:
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            silent_ms = int(1000 * SILENT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)

    @property
    def own_address(self) -> str:
        """The address of this machine by which it reaches the peer."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The address by which the peer is reached."""
        return str(self._socket.getpeername()[0])

    def send(self, header: Message, *body: Buffer) -> None:
        """Send one frame; the pieces of `body` are not copied."""
        text = json.dumps(header).encode()
        pieces = [memoryview(piece).cast("B") for piece in body]
        size = sum(map(len, pieces))
        start = _START.pack(MARK, len(text), size)
        self._send_all([memoryview(start + text), *pieces])
        self.sent_bytes += size
        self.control += len(start) + len(text)

    def receive(self, place: Place = new_memory) -> tuple[Message, memoryview]:
        """The next frame: its header, and its body in the memory that `place` gives."""
        header, size = self._header()
        body = place(header, size) if size else memoryview(b"")
        self._fill(body)
        self.received += size
        return header, body

    def _header(self) -> tuple[Message, int]:
        """The header of the next frame, and the size of its body."""
        mark, header_bytes, body_bytes = _START.unpack(self._exactly(_START.size))
        if mark != MARK or header_bytes > LARGEST_HEADER:
            raise Disconnected("it sent what is no message of ours")
        if body_bytes > self._most:
            raise Disconnected(f"it sent a message of {body_bytes} bytes, of {self._most} at most")
        try:
            header = json.loads(bytes(self._exactly(header_bytes)))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise Disconnected("it sent what is no message of ours")
        return header, body_bytes

    def ask(
        self, header: Message, *body: Buffer, place: Place = new_memory
    ) -> tuple[Message, memoryview]:
        """Send a frame and receive its answer; raises `Refused` if the answer is a refusal."""
        self.send(header, *body)
        answer, answer_body = self.receive(place)
        if "refused" in answer:
            raise Refused(str(answer["refused"]))
        return answer, answer_body

    def _send_all(self, pieces: Sequence[memoryview]) -> None:
        remaining = [piece for piece in pieces if len(piece)]
        try:
            while remaining:
                gone = self._socket.sendmsg(remaining)
                while remaining and gone >= len(remaining[0]):
                    gone -= len(remaining.pop(0))
                if remaining and gone:
                    remaining[0] = remaining[0][gone:]
        except OSError as error:
            raise self._broken(error) from error

    def _exactly(self, size: int) -> memoryview:
        memory = memoryview(bytearray(size))
        self._fill(memory)
        return memory

    def _fill(self, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            if not self._came and len(memory) - at < AHEAD:
                self._came = self._ahead[: self._received(self._ahead)]
            if self._came:
                more = min(len(self._came), len(memory) - at)
                memory[at : at + more], self._came = self._came[:more], self._came[more:]
            else:
                more = self._received(memory[at:])
            at += more

    def _received(self, memory: memoryview) -> int:
        """Receive into this memory; returns the number of bytes, at least one."""
        try:
            more = self._socket.recv_into(memory)
        except OSError as error:
            raise self._broken(error) from error
        if not more:
            raise Disconnected("it closed its connection")
        return more

    def _broken(self, error: OSError) -> Disconnected:
        if isinstance(error, TimeoutError) and error.errno is None:
            return Disconnected(f"nothing of it came or went for {self.timeout_s:g} s")
        return Disconnected(f"its connection broke: {error}")

    def waits_for_ever(self) -> None:
        """Wait without a time-out: a busy peer may be silent; TCP's probes detect a lost one."""
        self.timeout_s = 0.0
        self._socket.settimeout(None)

    def close(self) -> None:
        self._socket.close()

    def shut(self) -> None:
        """Shut the connection down, from any thread; a thread that waits for the peer fails."""
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- meeting point -------------------------------------------------------------------------------
# How processes outside any process group find rank 0, which serves them.
#
# On one machine rank 0 listens at a loopback port and writes it into the file of the attempt; on
# several nodes it listens at the address that the launcher gave it. A restarted process finds it
# the same way.


LOOK_S = 0.05
CONNECT_S = 5.0
LOCALHOST = "127.0.0.1"


def listen(world: World) -> socket.socket:
    """The socket at which the others find this process; rank 0 calls it, also after a restart."""
    if not world.rendezvous:
        local = socket.create_server((LOCALHOST, 0), backlog=256)
        _write(Path(world.store), local.getsockname()[1])
        return local
    if world.listener >= 0:
        inherited = socket.socket(fileno=os.dup(world.listener))
        inherited.listen(256)
        return inherited
    host, _, port = world.rendezvous.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=256)


def connect(world: World, most_bytes: int, timeout_s: float, patience_s: float) -> Connection:
    """A connection to rank 0. Raises `PeerLost` if it does not answer within `patience_s`, or does
    not know the secret of the job."""
    deadline, problem = time.monotonic() + patience_s, "it has not said where it listens"
    while True:
        try:
            where = address_of_rank_0(world)
            if where is not None:
                return connect_to(where, world.secret, most_bytes, timeout_s)
        except Refused as error:
            raise PeerLost(f"rank 0 refuses this process: {error}") from error
        except (OSError, Disconnected) as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise PeerLost(f"rank 0 did not answer for {patience_s:g} s: {problem}")
        time.sleep(LOOK_S)


def connect_to(
    where: tuple[str, int], secret: str, most_bytes: int, timeout_s: float
) -> Connection:
    """A connection to this address, after both ends have proved that they know the secret.

    Raises `OSError` if nothing listens there, `Refused` or `Disconnected`.
    """
    channel = connected(where, secret, CONNECT_S)
    return Connection(channel.released(), most_bytes, timeout_s)


def address_of_rank_0(world: World) -> tuple[str, int] | None:
    """Where rank 0 listens; `None` while it has not said so."""
    if world.rendezvous:
        host, _, port = world.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)
    try:
        return LOCALHOST, int(json.loads(Path(world.store).read_text())["port"])
    except FileNotFoundError:
        return None


def _write(path: Path, port: int) -> None:
    """Write the port atomically: a reader never sees half of it."""
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(json.dumps({"port": port}))
    new.replace(path)


# --- answering -----------------------------------------------------------------------------------
# A server of peers: one thread admits them, and one thread for each peer answers its messages.
#
# A connection gets a thread once it has proved that it knows the secret.
#
# The condition `changed` protects shared state; threads wait on it for each other.


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
