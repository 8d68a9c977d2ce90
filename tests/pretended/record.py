"""What the pretended device was told to do, with the line of allranks that did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import allranks

ENGINE = str(Path(allranks.__file__).parent) + "/"


class Misuse(RuntimeError):
    """What a CPU lets pass and a device does not, or answers with other numbers."""


@dataclass(frozen=True)
class Told:
    """One thing: a "kernel", a "wait" of the host, a "copy" nobody waits for, a "collective".

    Of a wait for "others", who send what the host reads, `what` is the phase of this rank.
    """

    kind: str
    what: str
    line: str


@dataclass
class Watched:
    """Everything that was told within."""

    told: list[Told] = field(default_factory=list)

    def of(self, kind: str) -> list[Told]:
        return [one for one in self.told if one.kind == kind]


_watching: list[Watched] = []
phase_of: list[Callable[[], str]] = []
"""Gives the phase that the rank of this process is in."""


def record(kind: str, what: str) -> None:
    """Note it, where somebody watches."""
    for watched in _watching:
        watched.told.append(Told(kind, what, line()))


@contextmanager
def watch() -> Iterator[Watched]:
    """Within, all that any thread of this process tells the device is noted."""
    watched = Watched()
    _watching.append(watched)
    try:
        yield watched
    finally:
        _watching.remove(watched)


def line() -> str:
    """`step/tally.py:102`: the innermost line of allranks; "" where autograd or a test is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(ENGINE):
            return f"{frame.f_code.co_filename.removeprefix(ENGINE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
