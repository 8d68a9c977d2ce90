"""Streams and events of the pretended device: who has waited for what, without any time passing.

Every stream has a clock that counts its kernels, and knows up to where it has waited for others. A
kernel may only read what its stream has written or waited for, and only write what nobody else may
still be reading. A copy to pinned memory is late on purpose: its bytes arrive when the host waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pretended.record import Misuse, line, phase_of, record

NAME = "pretended"
DEVICES = 2  # for tensors; autograd knows of the first alone, so a rank trains on that
Clocks = dict["Stream", int]

_host: Clocks = {}  # what the host has waited for comes before all that it starts later
_late: list[tuple[Stream, int, Callable[[], None]]] = []
_defaults: dict[int, Stream] = {}
_thread = threading.local()
of_collectives: set[Stream] = set()


class Stream:
    """A queue of kernels. Made on the current device, as those of CUDA are."""

    def __init__(self, device: Any = None, **ignored: Any) -> None:
        self.device = torch.device(NAME, index_of(device))
        self.clock = 0
        self.seen: Clocks = {}

    def comes_after(self, other: Stream, clock: int) -> bool:
        """Whether what is queued next begins when `other` has done its first `clock` kernels."""
        return other is self or max(self.seen.get(other, 0), _host.get(other, 0)) >= clock

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stands_for = {**self.seen, self: self.clock}
        return event

    def wait_event(self, event: Event) -> None:
        _later(self.seen, event.stands_for)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        record("wait", "Stream.synchronize")
        host_waits_for(self.record_event().stands_for)


class Event:
    """A mark in a stream; an event that was not recorded stands for nothing."""

    def __init__(self, **ignored: Any) -> None:
        self.stands_for: Clocks = {}

    def record(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        record("wait", "Event.synchronize")
        host_waits_for(self.stands_for)

    def query(self) -> bool:
        host_waits_for(self.stands_for)
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


@dataclass
class Memory:
    """What was done to one storage: by which stream it was taken, written, read and recorded."""

    taken_by: Stream
    written: tuple[Stream, int] | None = None
    read: Clocks = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    def is_read(self, stream: Stream, what: str) -> None:
        """Stamp a read; raises `Misuse` where it may come before the write."""
        if self.written is not None and not stream.comes_after(*self.written):
            raise Misuse(f"{what} reads what another stream writes, without an event, at {line()}")
        self.read[stream] = stream.clock + 1

    def is_written(self, stream: Stream, what: str) -> None:
        """Stamp a write; raises `Misuse` where others may still write or read."""
        uses = [*self.read.items(), *([self.written] if self.written else [])]
        if not all(stream.comes_after(*use) for use in uses):
            raise Misuse(f"{what} writes what another stream uses, without an event, at {line()}")
        self.written, self.read = (stream, stream.clock + 1), {}

    def __post_init__(self) -> None:
        """What its stream has freed may be given out again now."""
        for use, where in _freed.pop(self.taken_by, ()):
            if not self.taken_by.comes_after(*use):
                given_away.append(where)

    def __del__(self) -> None:
        uses = [*self.read.items(), *([self.written] if self.written else [])]
        freed = [(use, line()) for use in uses if use[0] not in self.recorded]
        _freed.setdefault(self.taken_by, []).extend(freed)


_freed: dict[Stream, list[tuple[tuple[Stream, int], str]]] = {}
given_away: list[str] = []
"""Where memory was freed that its stream took again while another could still use it."""


def arrives_late(stream: Stream, copy: Callable[[], None]) -> None:
    """The copy that `stream` ran last: it is there when the host has waited for it."""
    _late.append((stream, stream.clock, copy))


def host_waits_for(clocks: Clocks) -> None:
    """All that these clocks stand for is done, and what it copied to the host is there."""
    if phase_of and any(clocks.get(s, 0) > _host.get(s, 0) for s in of_collectives):
        record("others", phase_of[-1]())
    _later(_host, clocks)
    for waiting in list(_late):
        stream, clock, copy = waiting
        if _host.get(stream, 0) >= clock:
            _late.remove(waiting)
            copy()


def host_waits_for_device() -> None:
    """The host waits for everything: streams of one device are not told apart."""
    for stream in list(_all):
        host_waits_for({stream: stream.clock})


_all: set[Stream] = set()


def ran(stream: Stream) -> None:
    """One more kernel is queued."""
    stream.clock += 1
    _all.add(stream)


def index_of(device: Any) -> int:
    """The number of a device, given as torch takes them; the current one where none is."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_index() if index is None else index


def current_index() -> int:
    return int(getattr(_thread, "index", 0))


def set_index(device: Any) -> None:
    index = index_of(device)
    if not 0 <= index < DEVICES:
        raise RuntimeError(f"invalid device ordinal {index}")
    _thread.index = index


def default_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return _defaults.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    """Where this thread queues kernels for a device."""
    return _streams().get(index_of(device)) or default_stream(device)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    streams, before = _streams(), dict(_streams())
    streams[stream.device.index] = stream
    try:
        yield
    finally:
        streams.clear()
        streams.update(before)


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    before = current_index()
    set_index(device)
    try:
        yield
    finally:
        _thread.index = before


def _streams() -> dict[int, Stream]:
    found: dict[int, Stream] = _thread.__dict__.setdefault("streams", {})
    return found


def _later(clocks: Clocks, others: Clocks) -> None:
    for stream, clock in others.items():
        clocks[stream] = max(clocks.get(stream, 0), clock)
