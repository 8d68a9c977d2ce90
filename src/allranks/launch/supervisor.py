"""The supervisor owns the processes of a job on this node: starts, watches and stops them all.

It knows no framework. A rank that fails stops the others; Ctrl-C or SIGTERM stops everything. It
returns only when every process is gone. Who failed first is decided in `report`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    alive: dict[int, int] = {}  # pid -> rank
    exits: dict[int, Exit] = {}
    stopped: frozenset[int] = frozenset()
    interrupted = False
    stop_at = kill_at = float("inf")
    with _terminate_as_interrupt():
        try:
            for process in processes:
                pid = server.spawn(
                    process.target, process.argument, process.environment, process.log
                )
                alive[pid] = process.rank
        except KeyboardInterrupt:
            interrupted, stop_at = True, 0.0
        while alive:
            try:
                wait_s = min(TICK_S, max(0.0, min(stop_at, kill_at) - time.monotonic()))
                for ended in server.exits(wait_s):
                    if ended.pid in alive:
                        exits[alive.pop(ended.pid)] = ended
                        if ended.code != 0:
                            stop_at = min(stop_at, time.monotonic() + EVIDENCE_S)
                on_tick()
            except KeyboardInterrupt:
                interrupted, stop_at = True, min(stop_at, 0.0)
            now = time.monotonic()
            if now >= stop_at and not stopped:
                stopped = frozenset(alive.values())
                _signal_all(server, alive, signal.SIGTERM)
                stop_at, kill_at = float("inf"), now + GRACE_S
            if now >= kill_at:
                _signal_all(server, alive, signal.SIGKILL)
                kill_at = now + GRACE_S
    return Ended(exits, stopped, interrupted)


def _signal_all(server: ForkServer, alive: dict[int, int], number: int) -> None:
    for pid in alive:
        server.signal(pid, number)
        server.signal(pid, signal.SIGCONT)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM to the job means the same as Ctrl-C while ranks run. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
