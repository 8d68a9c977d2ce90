"""The probes of `allranks doctor`: a process for each rank, and the links between them.

The command starts the probes and gives them orders, one at a time. A probe connects back to the
command and proves that it knows the key. It examines the folder of runs, and measures the link to
another probe. Results come back over the connection, because the nodes may share no folder.

Two probes measure over plain TCP, and each stream is timed at its receiver: a sender may only have
filled the buffers of its kernel. The receiver closes the connection when it has measured enough.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from allranks.errors import PlaceError
from allranks.launcher.nodes.channel import (
    Admission,
    Channel,
    Disconnected,
    Message,
    authenticate,
    wait_for,
)
from allranks.launcher.processes.process import Process, Processes
from allranks.tools.doctor.folder import Mark, examine

MODULE = "allranks.tools.doctor.probes"
MOST_IN_FULL = 8  # ends of which every pair is measured
START_S = 60.0
ANSWER_S = 60.0
LEAVE_S = 10.0
TICK_S = 0.05
CONNECT_S = 10.0
MEET_S = 10.0
SILENCE_S = 20.0
PINGS, PINGS_S, FEWEST_PINGS = 200, 0.25, 3
STREAM_S = 0.4
UNCOUNTED = 8  # in the first eighth of its time a stream gets up to speed
CHUNK_BYTES = 1 << 20
PING, TAKE, GIVE = b"p", b"t", b"g"
Cells = list[list[float | None]]


# --- a link, measured by the processes at its ends ------------------------------------------------

Connect = Callable[[], AbstractContextManager[socket.socket]]


def measure(connect: Connect) -> dict[str, float]:
    """The median round trip to the process that serves there, and the rate of a stream from it.

    The rate of the stream to it is what `serve` returns there.
    """
    with connect() as connection:
        _prepare(connection)
        trips_ns = _pings(connection)
        connection.sendall(TAKE)
        _send_until_closed(connection)
    with connect() as connection:
        _prepare(connection)
        connection.sendall(GIVE)
        rate = _rate(connection)
    return {"round_trip_us": statistics.median(trips_ns) / 1e3, "back_mb_s": rate / 1e6}


def serve(connection: socket.socket) -> dict[str, float]:
    """The other end of a connection of `measure`: answers pings, then takes or gives a stream."""
    _prepare(connection)
    while (order := connection.recv(1)) == PING:
        connection.sendall(PING)
    if order == TAKE:
        return {"there_mb_s": _rate(connection) / 1e6}
    if order == GIVE:
        _send_until_closed(connection)
    return {}


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _pings(connection: socket.socket) -> list[int]:
    """Nanoseconds of round trips of one byte, without the first one, which is cold."""
    trips: list[int] = []
    until = time.monotonic() + PINGS_S
    while len(trips) <= PINGS and (time.monotonic() < until or len(trips) <= FEWEST_PINGS):
        before = time.perf_counter_ns()
        connection.sendall(PING)
        _receive(connection, memoryview(bytearray(1)))
        trips.append(time.perf_counter_ns() - before)
    return trips[1:]


def _send_until_closed(connection: socket.socket) -> None:
    chunk = bytes(CHUNK_BYTES)
    with suppress(ConnectionError):
        while True:
            connection.sendall(chunk)


def _rate(connection: socket.socket) -> float:
    """Bytes per second of the stream that arrives, without the first eighth of its time."""
    space, count, counted_from = memoryview(bytearray(CHUNK_BYTES)), 0, 0.0
    _receive(connection, space)
    begun = now = time.perf_counter()
    while not count or now - begun < STREAM_S:
        part = _receive(connection, space)
        now = time.perf_counter()
        if counted_from:
            count += part
        elif now - begun >= STREAM_S / UNCOUNTED:
            counted_from = now
    return count / (now - counted_from)


def _receive(connection: socket.socket, space: memoryview) -> int:
    """The number of bytes that came; raises `ConnectionError` if the connection is closed."""
    count = connection.recv_into(space)
    if not count:
        raise ConnectionError("the other end closed the connection")
    return count


# --- the process of a probe -----------------------------------------------------------------------


def main(argument: dict[str, Any]) -> int:
    """The process of a probe: `argument` has the address of the command, and the key."""
    connection = socket.create_connection((argument["address"], argument["port"]), CONNECT_S)
    with closing(Channel(connection)) as channel, suppress(Disconnected):
        authenticate(channel, argument["key"].encode())
        channel.send({"rank": argument["rank"]})
        _obey(channel)
    return 1  # the command is gone


def _obey(channel: Channel) -> None:
    """Execute the orders of the command; raises `Disconnected` when it leaves."""
    served: dict[str, float] = {}
    while True:
        wait_for([channel], MEET_S, [channel] * channel.is_behind)
        channel.flush()
        for order in channel.receive():
            if order["do"] == "listen":
                served = _listen(channel, order["address"])
            elif order["do"] == "look":
                channel.send({"answer": asdict(examine(Mark(**order["mark"])))})
            elif order["do"] == "measure":
                channel.send({"answer": _measured(order)})
            else:
                channel.send({"answer": served})


def _listen(channel: Channel, address: str) -> dict[str, float]:
    """Serve another probe that has the token, until the next order. Returns what was measured.

    The answer to the order has the port and the token.
    """
    try:
        listener = socket.create_server((address, 0))
    except OSError as error:
        channel.send({"answer": {"problem": str(error)}})
        return {}
    served: dict[str, float] = {}
    token = secrets.token_hex(16)
    with listener, closing(Admission(listener, token)) as admission:
        channel.send({"answer": {"port": listener.getsockname()[1], "token": token}})
        deadline = time.monotonic() + MEET_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            wait_for([*admission.ready, channel], remaining_s)
            for connection in admission.proved():
                with connection, suppress(OSError):  # the other end reports it
                    served |= serve(connection)
            if select.select([channel], [], [], 0)[0]:
                break
    return served


def _measured(order: Message) -> dict[str, Any]:
    """The link to the probe that listens there, or the problem."""

    @contextmanager
    def connect() -> Iterator[socket.socket]:
        where = (order["address"], order["port"])
        with closing(Channel(socket.create_connection(where, CONNECT_S))) as channel:
            authenticate(channel, order["token"].encode())
            yield channel.released()

    try:
        return {**measure(connect)}
    except OSError as error:
        return {"problem": str(error)}


# --- the command's side ---------------------------------------------------------------------------


class Lost(Exception):
    """A probe does not answer, or never connected; the message says why, if known."""


@dataclass(frozen=True)
class Door:
    """The address of the command, for a probe."""

    address: str
    port: int


@dataclass
class Probes:
    """A probe for each of some ranks. Leaving the context ends them all."""

    processes: Processes
    listener: socket.socket
    key: str
    lost: dict[int, str] = field(default_factory=dict)
    _channels: dict[int, Channel] = field(default_factory=dict)
    _tickets: dict[int, int] = field(default_factory=dict)  # ticket -> rank, while it runs

    def __post_init__(self) -> None:
        self._admission = Admission(self.listener, self.key)

    def start(self, doors: dict[int, Door]) -> None:
        """Start a probe for each rank, and wait until each is connected or lost."""
        for rank, door in doors.items():
            where = {"address": door.address, "port": door.port, "key": self.key, "rank": rank}
            process = Process(rank, f"{MODULE}:main", where, {}, Path(os.devnull))
            self._tickets[self.processes.spawn(process)] = rank
        deadline = time.monotonic() + START_S
        while missing := set(doors) - set(self._channels) - set(self.lost):
            self._admit()
            self._note_exits()
            if time.monotonic() > deadline:
                late = f"its process did not call back for {START_S:g} s"
                self.lost |= dict.fromkeys(missing, late)

    @property
    def there(self) -> list[int]:
        """The ranks whose probes answer."""
        return sorted(set(self._channels) - set(self.lost))

    def ask(self, rank: int, order: Message, seconds: float = ANSWER_S) -> Any:
        """The answer of a rank's probe to an order; raises `Lost`."""
        if rank not in self.there:
            raise Lost(self.lost.get(rank, "it was not started"))
        channel, deadline = self._channels[rank], time.monotonic() + seconds
        why = f"it did not answer for {seconds:g} s"
        try:
            channel.send(order)
            while rank not in self.lost and time.monotonic() < deadline:
                if messages := channel.receive():
                    return messages[0]["answer"]
                wait_for([channel], TICK_S)
                self._note_exits()
        except Disconnected as error:
            why = str(error)
            self._note_exits()  # its exit code says more
        raise Lost(self.lost.setdefault(rank, why))

    def _note_exits(self, timeout_s: float = 0.0) -> None:
        """Poll the owner of the processes, and note the probes that have ended."""
        for ended in self.processes.exits(timeout_s):
            rank = self._tickets.pop(ended.ticket, None)
            if rank is not None:
                why = ended.lost or f"its process ended with code {ended.code}"
                self.lost.setdefault(rank, why)

    def _admit(self) -> None:
        """Admit the probes that have connected, if they know the key."""
        wait_for(self._admission.ready, TICK_S)
        for channel, message in self._admission.admit():
            self._channels[int(message["rank"])] = channel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect all probes and wait for their ends; one that does not end is killed."""
        self._admission.close()
        for channel in self._channels.values():
            channel.close()
        deadline, kill_at = (time.monotonic() + seconds for seconds in (LEAVE_S, LEAVE_S / 2))
        with suppress(PlaceError):  # the owner itself is gone, and its processes with it
            while self._tickets and (now := time.monotonic()) < deadline:
                self._note_exits(TICK_S)
                for ticket in self._tickets if now > kill_at else ():
                    self.processes.signal(ticket, signal.SIGKILL)


# --- the links between ranks, one pair at a time, without disturbing each other -------------------


@dataclass(frozen=True)
class Endpoint:
    """A rank whose links to others were measured: its node and address."""

    rank: int
    node: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node} ({self.address})"


@dataclass(frozen=True)
class Matrix:
    """The links between ranks: from the end of a row to that of a column. `None`: not measured.

    Microseconds of a round trip, and 10^6 bytes per second of one stream.
    """

    ends: tuple[Endpoint, ...]
    round_trip_us: Cells
    mb_per_s: Cells

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "method": METHOD}


METHOD = {
    "round_trip_us": f"median of up to {PINGS} round trips of 1 byte over TCP",
    "mb_per_s": f"10^6 bytes per second of one TCP stream of {STREAM_S:g} s, timed where it "
    f"arrives, without the first 1/{UNCOUNTED} of its time; one pair and one direction at a time",
}


def measure_links(
    probes: Probes, ends: Sequence[Endpoint], failures: list[str], progress: Callable[[str], None]
) -> Matrix | None:
    """The links between these ends; `failures` receives a line for each failed measurement."""
    if len(ends) < 2:
        return None
    pairs = pairs_to_measure(len(ends))
    progress(f"measuring {len(pairs)} pair{'s' if len(pairs) > 1 else ''} of ranks, one by one")
    trips: Cells = [[None] * len(ends) for _ in ends]
    rates: Cells = [[None] * len(ends) for _ in ends]
    for i, j in pairs:
        try:
            speeds = _measure(probes, ends[i], ends[j])
        except Lost:
            continue
        if "problem" in speeds:
            failures.append(f"{ends[i]} to {ends[j]}: {speeds['problem']}")
            continue
        trips[i][j] = trips[j][i] = speeds["round_trip_us"]
        rates[i][j], rates[j][i] = speeds["there_mb_s"], speeds["back_mb_s"]
    return Matrix(tuple(ends), trips, rates)


def pairs_to_measure(count: int) -> list[tuple[int, int]]:
    """All pairs of a few ends; of many ends, pairs with the first end and with neighbours.

    The number of all pairs grows as the square of the nodes: a hundred would take hours.
    """
    pairs = itertools.combinations(range(count), 2)
    return [(i, j) for i, j in pairs if count <= MOST_IN_FULL or i == 0 or j == i + 1]


def _measure(probes: Probes, start: Endpoint, other: Endpoint) -> dict[str, Any]:
    """The link from `start` to `other` and back, or the problem; raises `Lost`."""
    where = probes.ask(other.rank, {"do": "listen", "address": other.address})
    if "problem" in where:
        return dict(where)
    served = {"problem": "the stream broke"}
    try:
        order = {"do": "measure", "address": other.address, **where}
        measured = probes.ask(start.rank, order)
    finally:
        with suppress(Lost):
            served = probes.ask(other.rank, {"do": "stop"}) or served
    return {**served, **measured}
