"""Stragglers: a rank that works longer on each step than the others, who wait for it.

In synchronous training every rank's step takes as long as the slowest; what tells them apart is
how much of it they work and how much they wait. The heartbeat counts both.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

from allranks.job.run_folder import JsonLines
from allranks.launcher.heartbeat import Beat, HeartbeatTable

EVERY_S = 5.0
FEWEST_STEPS = 5
TIMES_SLOWER = 2.0
LEAST_S = 0.005  # per step: below, a busy machine makes such differences by itself
WORK = ("data", "compute")


class Stragglers:
    """Looks at the heartbeats of one attempt every few seconds; each straggler is told once."""

    def __init__(self, heartbeats: HeartbeatTable, events: JsonLines, hosts: Sequence[str]) -> None:
        self.heartbeats, self.events, self.hosts = heartbeats, events, hosts
        self._before = heartbeats.read()
        self._next = time.monotonic() + EVERY_S
        self._told: set[tuple[int, str]] = set()

    def look(self) -> None:
        """If it is time, compare the ranks' work per step since the last look."""
        if len(self._before) < 2 or time.monotonic() < self._next:
            return
        now, self._next = self.heartbeats.read(), time.monotonic() + EVERY_S
        if steps_between(self._before, now) < FEWEST_STEPS:
            return  # long steps: the comparison goes on from where it began
        for rank, phase, own_s, usual_s in slower(self._before, now):
            if (rank, phase) not in self._told:
                self._told.add((rank, phase))
                self.events.event(
                    "straggler",
                    rank=rank,
                    host=self.hosts[rank] or socket.gethostname(),
                    phase=phase,
                    seconds_per_step=own_s,
                    usual_seconds_per_step=usual_s,
                )
        self._before = now


def steps_between(before: list[Beat], now: list[Beat]) -> int:
    """The steps that every rank has made since."""
    return min(n.step - max(b.step, 0) for b, n in zip(before, now, strict=True))


def slower(before: list[Beat], now: list[Beat]) -> list[tuple[int, str, float, float]]:
    """(rank, phase, its seconds per step, the median of the others') for each that is slower."""
    steps = steps_between(before, now)
    if steps < FEWEST_STEPS:
        return []
    found = []
    for phase in WORK:
        spent = [
            (n.seconds[phase] - b.seconds[phase]) / steps for b, n in zip(before, now, strict=True)
        ]
        for rank, own in enumerate(spent):
            usual = statistics.median(spent[:rank] + spent[rank + 1 :])
            if own > TIMES_SLOWER * usual and own - usual > LEAST_S:
                found.append((rank, phase, own, usual))
    return found
