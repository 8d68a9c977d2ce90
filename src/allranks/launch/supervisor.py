"""The supervisor owns the processes of a job on this node: starts, watches and stops them all.

It knows no framework. A rank that fails stops the others; Ctrl-C or SIGTERM stops everything. It
returns only when every process is gone. Who failed first is decided in `report`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allranks.errors import PlaceError
from allranks.launch.server import Exit, ForkServer

TICK_S = 0.1
EVIDENCE_S = 0.2
GRACE_S = 2.0


@dataclass(frozen=True)
class Process:
    """One process to start: its rank, what it calls, what is added to its environment, its log."""

    rank: int
    target: str
    argument: Any
    environment: dict[str, str]
    log: Path


@dataclass(frozen=True)
class Ended:
    """All processes are gone. `exits` by rank; `stopped` are the ranks that were told to stop."""

    exits: dict[int, Exit]
    stopped: frozenset[int]
    interrupted: bool


def supervise(
    server: ForkServer, processes: list[Process], on_tick: Callable[[], None] = lambda: None
) -> Ended:
    """Run all `processes` to their end; one that fails, or an interrupt, stops the rest."""
    alive: dict[int, int] = {}  # ticket -> rank
    exits: dict[int, Exit] = {}
    stopped: frozenset[int] = frozenset()
    stop_at = kill_at = float("inf")
    with _Interrupts() as interrupts, _nothing_left(server, alive):
        for process in processes:
            ticket = server.spawn(
                process.target, process.argument, process.environment, process.log
            )
            alive[ticket] = process.rank
        while alive:
            for ended in server.exits(TICK_S):
                if ended.ticket in alive:
                    exits[alive.pop(ended.ticket)] = ended
                    if ended.code != 0:
                        stop_at = min(stop_at, time.monotonic() + EVIDENCE_S)
            on_tick()
            now = time.monotonic()
            if (now >= stop_at or interrupts.seen) and not stopped:
                stopped = frozenset(alive.values())
                _signal_all(server, alive, signal.SIGTERM)
                stop_at, kill_at = float("inf"), now + GRACE_S
            if now >= kill_at:
                _signal_all(server, alive, signal.SIGKILL)
                kill_at = now + GRACE_S
    return Ended(exits, stopped, interrupts.seen)


def _signal_all(server: ForkServer, alive: dict[int, int], number: int) -> None:
    for ticket in alive:
        server.signal(ticket, number)
        server.signal(ticket, signal.SIGCONT)


@contextmanager
def _nothing_left(server: ForkServer, alive: dict[int, int]) -> Iterator[None]:
    """If watching itself breaks, the processes are killed before the error goes on."""
    try:
        yield
    except BaseException:
        with suppress(PlaceError):
            _signal_all(server, alive, signal.SIGKILL)
            while alive:
                for ended in server.exits(TICK_S):
                    alive.pop(ended.ticket, None)
        raise


class _Interrupts:
    """While ranks run, SIGINT and SIGTERM to the supervisor are noted, not raised in mid-message.

    Only the main thread of a process can take signals; elsewhere nothing is changed.
    """

    seen = False

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        self.seen = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
