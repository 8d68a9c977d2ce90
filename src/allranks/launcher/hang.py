"""Who is missing when nothing moves: a job whose ranks show no sign of life, rank by rank.

A rank that waits in a collective waits for somebody. Missing are those that do not wait; if all
wait, those that the user's code has called into a collective where the others are in the engine's,
else those whose count of collectives does not fit their step. The stacks are written by the ranks
themselves, from wherever they stand (`stacks`).
"""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from allranks.errors import FaultKind
from allranks.job.run_folder import JsonLines
from allranks.launcher.heartbeat import Beat, HeartbeatTable
from allranks.launcher.processes.process import ProcessState, is_said

# --- mismatch ------------------------------------------------------------------------------------
# Ranks that met in different collectives: which of them stood where, when one failed of it.
#
# In shared memory each says what the other makes. Gloo ends a rank that gets a message of another
# size than it waits for, and that rank is seldom the one to blame. The others are asked for their
# stacks before they are stopped. Pure.


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.M)
_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"
_PUBLIC = re.compile(r"/(?:trainer|comm)\.py$")  # what a task may call, of this package
_CALLS_A_MODULE = "/torch/nn/modules/module.py"
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def callers_alone(said: str, stacks: Mapping[int, str]) -> dict[int, str]:
    """The ranks that the user's code had called into a collective, with its line; the others not.

    Nobody where ranks did not meet in different collectives, or where all were called alike.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, said):
        return {}
    places = {rank: place_of_users_collective(stack) for rank, stack in sorted(stacks.items())}
    callers = {rank: place for rank, place in places.items() if place}
    return callers if len(callers) < len(places) else {}


def told_of_mismatch(said: str, rank: int, stacks: Mapping[int, str]) -> list[str]:
    """Who made another collective, or that sizes differ in the same one; nothing else is told.

    `said` is what `rank`, which died, wrote; `stacks` are where all stood: the traceback with which
    they left, or where they waited.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, said):
        return []
    if alone := callers_alone(said, stacks):
        lines = [f"rank {one} called it: {place}" for one, place in alone.items()]
        return [*lines, f"the others were in {ENGINES}: every rank calls a collective, or none"]
    places = {one: place_of_users_collective(stack) for one, stack in stacks.items()}
    own = places.pop(rank, "")
    odd = {one: place for one, place in sorted(places.items()) if place != own}
    if own and not odd:
        return [f"rank {rank} called it: {own}: does every rank call it, in the same place?"]
    if not odd:
        return [
            "the ranks met in collectives of different sizes: has one of them a model of another "
            "shape, or one collective more?"
        ]
    return [
        f"rank {one} was in another collective: {place or ENGINES}" for one, place in odd.items()
    ]


ENGINES = "one of the engine"


def place_of_users_collective(stack: str) -> str:
    """`mytask.py line 14 in loss`: the user's line that called a collective; "" if none did.

    One of torch, or a method of the trainer, all of whose ranks call it. What a module of the model
    does as it is called is the engine's.
    """
    for thread in _THREAD.split(stack):
        frames = [match.groupdict() for match in _FRAME.finditer(thread)]
        if "most recent call last" in thread:
            frames.reverse()
        has_torch, inner = False, ""
        for frame in frames:
            file = frame["file"]
            has_torch = has_torch or "/torch/distributed/" in file
            if file.endswith(_CALLS_A_MODULE):
                break
            if not (file.startswith(_PACKAGE_FOLDER) or any(p in file for p in _INSTALLED)):
                is_own = inner.startswith(_PACKAGE_FOLDER)
                if _PUBLIC.search(inner) if is_own else has_torch:
                    return f"{file} line {frame['line']} in {frame['name']}"
                break
            inner = file
    return ""


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
    stands: Callable[[], dict[int, ProcessState]],
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
