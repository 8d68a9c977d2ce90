"""The program of `allranks doctor` on each rank: it examines its node and measures its links.

One process stands for each rank. It connects back to the command, authenticates with the key, and
then executes one order after another: examine its node, return the time, measure the link to
another probe. Two probes measure over a plain TCP connection. Both directions are timed at the
receiver, because a sender may only have filled the buffers of its kernel.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from allranks.launcher.nodes.channel import (
    Admission,
    Channel,
    Disconnected,
    Message,
    authenticate,
    wait_for,
)
from allranks.tools.doctor.examination import Mark, examine

CONNECT_S = 10.0
MEET_S = 10.0
SILENCE_S = 20.0
PINGS, PINGS_S, FEWEST_PINGS = 200, 0.25, 3
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 14, 1 << 33, 4
STREAM_S = 0.4
UNCOUNTED = 8  # the first eighth of a stream is on its way up to speed
CHUNK_BYTES = 1 << 20

_ORDER = struct.Struct("!cQ")  # what comes next, and how many bytes of it
_ANSWER = struct.Struct("!QQQ")  # an `Arrival`
PING, TAKE, GIVE, LEAVE = b"p", b"t", b"g", b"l"


@dataclass(frozen=True)
class Arrival:
    """A stream, timed at its receiver: the whole of it, and the counted part."""

    whole_ns: int
    counted_bytes: int
    counted_ns: int

    @property
    def bytes_per_s(self) -> float:
        return self.counted_bytes / max(1, self.counted_ns) * 1e9


@dataclass(frozen=True)
class LinkSpeeds:
    """The link between two probes: the median round trip, and the rate of a stream each way.

    Microseconds, and 10^6 bytes per second; `pings` is how many round trips there were.
    """

    round_trip_us: float
    pings: int
    there_mb_s: float
    back_mb_s: float


def measure(connection: socket.socket) -> LinkSpeeds:
    """Measure the link to the process that serves the other end; takes about a second."""
    _prepare(connection)

    def there(count: int) -> Arrival:
        connection.sendall(_ORDER.pack(TAKE, count))
        _send(connection, count)
        return Arrival(*_ANSWER.unpack(_exactly(connection, _ANSWER.size)))

    def back(count: int) -> Arrival:
        connection.sendall(_ORDER.pack(GIVE, count))
        return _arrival(connection, count)

    trips_ns = _pings(connection)
    speeds = LinkSpeeds(
        round_trip_us=statistics.median(trips_ns) / 1e3,
        pings=len(trips_ns),
        there_mb_s=_rate(there) / 1e6,
        back_mb_s=_rate(back) / 1e6,
    )
    connection.sendall(_ORDER.pack(LEAVE, 0))
    return speeds


def serve(connection: socket.socket) -> None:
    """The other end of `measure`: answers pings, receives and sends until it is done."""
    _prepare(connection)
    while True:
        kind, count = _ORDER.unpack(_exactly(connection, _ORDER.size))
        if kind == PING:
            connection.sendall(_ORDER.pack(PING, count))
        elif kind == TAKE:
            arrival = _arrival(connection, count)
            connection.sendall(
                _ANSWER.pack(arrival.whole_ns, arrival.counted_bytes, arrival.counted_ns)
            )
        elif kind == GIVE:
            _send(connection, count)
        else:
            return


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _pings(connection: socket.socket) -> list[int]:
    """Nanoseconds of round trips of a few bytes, without the first one, which is cold."""
    trips: list[int] = []
    until = time.monotonic() + PINGS_S
    while len(trips) <= PINGS and (time.monotonic() < until or len(trips) <= FEWEST_PINGS):
        before = time.perf_counter_ns()
        connection.sendall(_ORDER.pack(PING, len(trips)))
        _exactly(connection, _ORDER.size)
        trips.append(time.perf_counter_ns() - before)
    return trips[1:]


def _rate(stream: Callable[[int], Arrival]) -> float:
    """Bytes per second of a long enough stream; shorter streams determine its length.

    Each is at most four times the last: a link may pass a burst at once, and an estimate from it
    would be far too long.
    """
    count = FIRST_BYTES
    while True:
        arrival = stream(count)
        if arrival.whole_ns >= STREAM_S / 2 * 1e9 or count >= MOST_BYTES:
            return arrival.bytes_per_s
        enough = int(arrival.bytes_per_s * STREAM_S)
        count = min(MOST_BYTES, GROWTH * count, max(2 * count, enough))


def _send(connection: socket.socket, count: int) -> None:
    chunk = memoryview(bytes(min(count, CHUNK_BYTES)))
    while count:
        part = min(count, len(chunk))
        connection.sendall(chunk[:part])
        count -= part


def _arrival(connection: socket.socket, count: int) -> Arrival:
    """Receive `count` bytes, and time all but the first eighth of them."""
    space, came, uncounted = memoryview(bytearray(min(count, CHUNK_BYTES))), 0, 0
    begun = counted_from = time.perf_counter_ns()
    while came < count:
        part = connection.recv_into(space[: min(len(space), count - came)])
        if not part:
            raise ConnectionError("the other end closed the connection")
        came += part
        if not uncounted and count // UNCOUNTED <= came < count:
            uncounted, counted_from = came, time.perf_counter_ns()
    now = time.perf_counter_ns()
    return Arrival(now - begun, count - uncounted, now - counted_from)


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise ConnectionError("the other end closed the connection")
        content += part
    return content


class Probe:
    """The loop of one probe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: dict[str, Callable[[Message], Any]] = {
            "look": lambda message: examine(Mark(**message["mark"])).to_data(),
            "clock": lambda message: time.time(),
            "measure": self._measure,
            "stop": lambda message: None,
        }

    def run(self) -> None:
        """Execute orders until the order to leave."""
        while (message := self._next())["do"] != "leave":
            if message["do"] == "listen":
                self._listen(message)
            else:
                self._reply(self._answers[message["do"]](message))

    def _next(self) -> Message:
        """The next order; the command sends one at a time."""
        while True:
            behind = [self._channel] if self._channel.is_behind else []
            select.select([self._channel], behind, [])
            self._channel.flush()
            if messages := self._channel.receive():
                return messages[0]

    def _reply(self, answer: Any) -> None:
        self._channel.send({"answer": answer})

    def _measure(self, message: Message) -> dict[str, Any]:
        """The link to the probe that listens there, or the problem."""
        try:
            where = (message["address"], message["port"])
            with closing(Channel(socket.create_connection(where, CONNECT_S))) as channel:
                authenticate(channel, message["token"].encode())
                return asdict(measure(channel.released()))
        except OSError as error:
            return {"problem": str(error)}

    def _listen(self, message: Message) -> None:
        """Serve one other probe that has the token; the reply is the port and the token."""
        try:
            listener = socket.create_server((message["address"], 0))
        except OSError as error:
            self._reply({"problem": str(error)})
            return
        with listener:
            token = secrets.token_hex(16)
            admission = Admission(listener, token)
            self._reply({"port": listener.getsockname()[1], "token": token})
            deadline = time.monotonic() + MEET_S
            with closing(admission):
                while (remaining_s := deadline - time.monotonic()) > 0:
                    wait_for([*admission.ready, self._channel], remaining_s)
                    for connection in admission.proved():
                        with connection, suppress(OSError):  # the other end reports it
                            serve(connection)
                        return
                    if select.select([self._channel], [], [], 0)[0]:  # a new order: no peer
                        return


def main(argument: dict[str, Any]) -> int:
    """The process of a probe: `argument` has the address of the command, and the key."""
    connection = socket.create_connection((argument["address"], argument["port"]), CONNECT_S)
    try:
        with closing(Channel(connection)) as channel:
            authenticate(channel, argument["key"].encode())
            channel.send({"rank": argument["rank"], "pid": os.getpid()})
            Probe(channel).run()
    except Disconnected:  # the command is gone
        return 1
    return 0
