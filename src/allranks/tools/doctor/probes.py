"""The command's side of the probes of `allranks doctor`: starts, queries and ends them.

Results come back over a connection and not through files, because the nodes may not share a
folder.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from allranks.errors import PlaceError
from allranks.launcher.nodes.channel import Admission, Channel, Disconnected, Message, wait_for
from allranks.launcher.processes.process import Process, Processes
from allranks.tools.doctor.diagnosis import MOST_IN_FULL, Endpoint, Link, Matrix, matrix_of

MODULE = "allranks.tools.doctor.probe"
START_S = 60.0
ANSWER_S = 60.0
LEAVE_S = 10.0
TICK_S = 0.05


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

    def ask(self, rank: int, message: Message, seconds: float = ANSWER_S) -> Any:
        """The answer of a rank's probe to a message; raises `Lost`."""
        self.send(rank, message)
        return self.receive(rank, seconds)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to the probe of a rank; raises `Lost`."""
        if rank in self.lost or rank not in self._channels:
            raise Lost(self.lost.get(rank, "it was not started"))
        try:
            self._channels[rank].send(message)
        except Disconnected as error:
            raise self._lose(rank, str(error)) from error

    def receive(self, rank: int, seconds: float = ANSWER_S) -> Any:
        """The next answer of the probe of a rank; raises `Lost` if none comes."""
        channel, deadline = self._channels[rank], time.monotonic() + seconds
        while rank not in self.lost:
            select.select([channel], [], [], TICK_S)
            try:
                if messages := channel.receive():
                    return messages[0]["answer"]
            except Disconnected as error:
                raise self._lose(rank, str(error)) from error
            self._note_exits()
            if time.monotonic() > deadline:
                raise self._lose(rank, f"it did not answer for {seconds:g} s")
        raise Lost(self.lost[rank])

    def _lose(self, rank: int, why: str) -> Lost:
        self._note_exits()
        self.lost.setdefault(rank, why)
        return Lost(self.lost[rank])

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
        """End all probes and wait for them; one that does not end is killed."""
        for rank in self.there:
            with suppress(Lost):
                self.send(rank, {"do": "leave"})
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


def measure_links(
    probes: Probes, ends: Sequence[Endpoint], failures: list[str], progress: Callable[[str], None]
) -> Matrix | None:
    """The links between these ends; `failures` receives a line for each failed measurement."""
    if len(ends) < 2:
        return None
    pairs = pairs_to_measure(ends)
    progress(f"measuring {len(pairs)} pair{'s' if len(pairs) > 1 else ''} of ranks, one by one")
    links: dict[tuple[int, int], Link] = {}
    for start, other in pairs:
        try:
            speeds = _measure(probes, start, other)
        except Lost:
            continue
        if "problem" in speeds:
            failures.append(f"{_named(start)} to {_named(other)}: {speeds['problem']}")
            continue
        trip_us = float(speeds["round_trip_us"])
        links[start.rank, other.rank] = Link(trip_us, float(speeds["there_mb_s"]))
        links[other.rank, start.rank] = Link(trip_us, float(speeds["back_mb_s"]))
    return matrix_of(ends, links)


def pairs_to_measure(ends: Sequence[Endpoint]) -> list[tuple[Endpoint, Endpoint]]:
    """All pairs of a few ends; of many ends, pairs with the first end and with neighbours.

    The number of all pairs grows as the square of the nodes: a hundred would take hours.
    """
    numbers = range(len(ends))
    if len(ends) <= MOST_IN_FULL:
        return [(ends[i], ends[j]) for i in numbers for j in numbers if i < j]
    wanted = {(0, j) for j in numbers if j} | {(j - 1, j) for j in numbers if j}
    return [(ends[i], ends[j]) for i, j in sorted(wanted)]


def _measure(probes: Probes, start: Endpoint, other: Endpoint) -> dict[str, Any]:
    """The link from `start` to `other` and back, as their probes measure it; raises `Lost`."""
    door = dict(probes.ask(other.rank, {"do": "listen", "address": other.address}))
    if "problem" in door:
        return door
    try:
        order = {"do": "measure", "address": other.address, **door}
        return dict(probes.ask(start.rank, order))
    finally:
        with suppress(Lost):
            probes.ask(other.rank, {"do": "stop"})


def _named(end: Endpoint) -> str:
    return f"rank {end.rank} on {end.node} ({end.address})"
