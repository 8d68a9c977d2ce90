"""Who is missing when nothing moves: a job whose ranks show no sign of life, rank by rank.

A rank that waits in a collective waits for somebody. Missing are those that do not wait; if all
wait, those that the user's code has called into a collective where the others are in the engine's,
else those whose count of collectives does not fit their step. The stacks are written by the ranks
themselves, from wherever they stand (`stacks`).
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from allranks.job.run_folder import JsonLines
from allranks.launcher.heartbeat import Beat, HeartbeatTable
from allranks.launcher.mismatch import place_of_users_collective
from allranks.launcher.processes.process import Stand

STATES = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "R": "running: computing, or in an endless loop",
    "D": "waiting for a disk or a network file system",
    "S": "sleeping",
}


@dataclass(frozen=True)
class Hang:
    """What was found: every rank's last beat and stack, and which ranks are missing."""

    timeout_s: float
    when: float
    beats: dict[int, Beat]
    missing: tuple[int, ...]
    states: dict[int, str]
    stacks: dict[int, str]

    def describe(self, rank: int) -> str:
        """Where one rank stands, in a sentence without its stack."""
        beat = self.beats[rank]
        where = f"`{beat.phase}`" + (f" of step {beat.step}" if beat.step >= 0 else "")
        state = STATES.get(self.states[rank], f"state {self.states[rank]}")
        since = self.when - beat.since
        place = place_of_users_collective(self.stacks[rank])
        called = f"; called by {place}" if place else ""
        told = f"in {where} for {since:.1f} s, after {beat.collectives} collectives; {state}"
        return told + called

    def __str__(self) -> str:
        """All ranks with their stacks, the missing ones first."""
        others = [rank for rank in sorted(self.beats) if rank not in self.missing]
        parts = [
            f"rank {rank}{' (missing)' if rank in self.missing else ''}: {self.describe(rank)}\n"
            f"{self.stacks[rank] or 'it wrote no stack'}"
            for rank in (*self.missing, *others)
        ]
        return "\n".join(parts)


def find_hang(
    beats: list[Beat],
    ranks: Collection[int],
    timeout_s: float,
    awake_since: float,
    stands: Callable[[], dict[int, Stand]],
) -> Hang | None:
    """The hang of the living `ranks`, or `None` while there is life.

    Nothing moves if a rank that waits for nobody has stood still for `timeout_s`, or all have.
    What lies before `awake_since` does not count. `stands` asks them where they stand.
    """
    now = time.monotonic()
    living = {beat.rank: beat for beat in beats if beat.rank in ranks}
    still = {
        rank for rank, beat in living.items() if now - max(beat.since, awake_since) > timeout_s
    }
    at_fault = {rank for rank in still if not _waits(living[rank])}
    if not living or not (at_fault or len(still) == len(living)):
        return None
    found = stands()
    states = {rank: found[rank].state if rank in found else "" for rank in living}
    stacks = {rank: found[rank].stacks if rank in found else "" for rank in living}
    called = {rank for rank, stack in stacks.items() if place_of_users_collective(stack)}
    if at_fault or len(called) == len(living):
        called = set()
    missing = ranks_waited_for(living, at_fault or called)
    return Hang(timeout_s, now, living, missing, states, stacks)


def _waits(beat: Beat) -> bool:
    """Whether a rank waits for others: itself, or for its thread that saves and does."""
    return beat.phase == "exchange" or (beat.phase == "save" and beat.save_waits)


def ranks_waited_for(beats: dict[int, Beat], at_fault: set[int]) -> tuple[int, ...]:
    """The ranks that the others wait for: those that are `at_fault`, or short of a collective."""
    if at_fault:
        return tuple(sorted(at_fault))
    fewest = min(beat.collectives for beat in beats.values())
    behind = [beat for beat in beats.values() if beat.collectives == fewest]
    furthest = max(beat.step for beat in behind)  # the same count at a later step: one left out
    found = sorted(beat.rank for beat in behind if beat.step == furthest)
    return tuple(found) if len(found) < len(beats) else ()


# --- straggler -----------------------------------------------------------------------------------
# Stragglers: a rank that works longer on each step than the others, who wait for it.
#
# In synchronous training every rank's step takes as long as the slowest; what tells them apart is
# how much of it they work and how much they wait. The heartbeat counts both.


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
