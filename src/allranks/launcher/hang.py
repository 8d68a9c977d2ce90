"""Who is missing when nothing moves: a job whose ranks show no sign of life, rank by rank.

A rank that waits in a collective waits for somebody. Missing are those that do not wait; if all
wait, those that the user's code has called into a collective where the others are in the engine's,
else those whose count of collectives does not fit their step. The stacks are written by the ranks
themselves, from wherever they stand (`stacks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from allranks.launcher.heartbeat import Beat
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
