"""Hangs and stragglers: which rank the others wait for, from heartbeats and stacks.

A rank in a collective waits for others. The missing ranks are those that do not wait. If all wait,
they are the ranks whose user code called a collective while the others are in one of the engine,
or else the ranks whose count of collectives does not fit their step. The ranks write their stacks
themselves (`stacks`).
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
# Ranks that called different collectives: where each rank was when one failed because of it.
#
# In shared memory each rank reports the collective of the other. Gloo ends the rank that gets a
# message of another size than it expects, which is seldom the rank to blame. The other ranks write
# their stacks before they are stopped. Pure.


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.M)
_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"
_PUBLIC = re.compile(r"/(?:trainer|comm)\.py$")  # what a task may call, of this package
_CALLS_A_MODULE = "/torch/nn/modules/module.py"
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def callers_alone(message: str, stacks: Mapping[int, str]) -> dict[int, str]:
    """Rank -> line of user code, for ranks whose user code called a collective the others did not.

    Empty unless `message` tells of a mismatch, or if user code called it on every rank.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, message):
        return {}
    places = {rank: place_of_users_collective(stack) for rank, stack in sorted(stacks.items())}
    callers = {rank: place for rank, place in places.items() if place}
    return callers if len(callers) < len(places) else {}


def describe_mismatch(message: str, rank: int, stacks: Mapping[int, str]) -> list[str]:
    """Lines about a mismatch: the ranks in another collective, or other sizes in the same one.

    `message` is the output of `rank`, which died; `stacks` has the traceback with which each rank
    left, or the stack where it waited.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, message):
        return []
    if alone := callers_alone(message, stacks):
        lines = [f"rank {r} called it: {place}" for r, place in alone.items()]
        return [*lines, f"the others were in {ENGINES}: every rank calls a collective, or none"]
    places = {r: place_of_users_collective(stack) for r, stack in stacks.items()}
    place_of_rank = places.pop(rank, "")
    odd = {r: place for r, place in sorted(places.items()) if place != place_of_rank}
    if place_of_rank and not odd:
        return [
            f"rank {rank} called it: {place_of_rank}: does every rank call it, in the same place?"
        ]
    if not odd:
        return [
            "the ranks met in collectives of different sizes: has one of them a model of another "
            "shape, or one collective more?"
        ]
    return [f"rank {r} was in another collective: {place or ENGINES}" for r, place in odd.items()]


ENGINES = "one of the engine"


def place_of_users_collective(stack: str) -> str:
    """`mytask.py line 14 in loss`: the user's line that called a collective; "" if none did.

    It is a collective of torch, or a method of the trainer that all ranks call. A collective in
    the forward pass of a module counts as the engine's.
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
    """Every rank's last beat and stack, and which ranks are missing."""

    timeout_s: float
    when: float
    beats: dict[int, Beat]
    missing: tuple[int, ...]
    states: dict[int, str]
    stacks: dict[int, str]

    def describe(self, rank: int) -> str:
        """Where one rank is, in a sentence without its stack."""
        beat = self.beats[rank]
        where = f"`{beat.phase}`" + (f" of step {beat.step}" if beat.step >= 0 else "")
        state = STATES.get(self.states[rank], f"state {self.states[rank]}")
        since = self.when - beat.since
        place = place_of_users_collective(self.stacks[rank])
        called = f"; called by {place}" if place else ""
        text = f"in {where} for {since:.1f} s, after {beat.collectives} collectives; {state}"
        return text + called

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
    """The hang of the living `ranks`, or `None` if there is none.

    A job hangs if a rank outside a collective has made no progress for `timeout_s`, or if no rank
    has. Time before `awake_since` does not count. `stands` asks the ranks for their stacks.
    """
    now = time.monotonic()
    living = {beat.rank: beat for beat in beats if beat.rank in ranks}
    still = {
        rank for rank, beat in living.items() if now - max(beat.since, awake_since) > timeout_s
    }
    at_fault = {rank for rank in still if not _waits(living[rank])}
    if not living or not (at_fault or len(still) == len(living)):
        return None
    states_of = stands()
    states = {rank: states_of[rank].state if rank in states_of else "" for rank in living}
    stacks = {rank: states_of[rank].stacks if rank in states_of else "" for rank in living}
    called = {rank for rank, stack in stacks.items() if place_of_users_collective(stack)}
    if at_fault or len(called) == len(living):
        called = set()
    missing = ranks_waited_for(living, at_fault or called)
    return Hang(timeout_s, now, living, missing, states, stacks)


def _waits(beat: Beat) -> bool:
    """Whether a rank waits for others, itself or in its thread that saves."""
    return beat.phase == "exchange" or (beat.phase == "save" and beat.save_waits)


def ranks_waited_for(beats: dict[int, Beat], at_fault: set[int]) -> tuple[int, ...]:
    """The ranks that the others wait for: those `at_fault`, or those that skipped a collective."""
    if at_fault:
        return tuple(sorted(at_fault))
    fewest = min(beat.collectives for beat in beats.values())
    behind = [beat for beat in beats.values() if beat.collectives == fewest]
    furthest = max(beat.step for beat in behind)  # same count at a later step: one was skipped
    awaited = sorted(beat.rank for beat in behind if beat.step == furthest)
    return tuple(awaited) if len(awaited) < len(beats) else ()


# --- straggler -----------------------------------------------------------------------------------
# Stragglers: ranks that work longer on each step than the others, which wait for them.
#
# In synchronous training every rank's step takes as long as the slowest one. The heartbeat counts
# how much of it a rank works and how much it waits.


EVERY_S = 5.0
FEWEST_STEPS = 5
TIMES_SLOWER = 2.0
LEAST_S = 0.005  # per step; smaller differences are noise of a busy machine
WORK = ("data", "compute")


class Stragglers:
    """Compares the heartbeats of one attempt every few seconds; reports each straggler once."""

    def __init__(self, heartbeats: HeartbeatTable, events: JsonLines, hosts: Sequence[str]) -> None:
        self.heartbeats, self.events, self.hosts = heartbeats, events, hosts
        self._before = heartbeats.read()
        self._next = time.monotonic() + EVERY_S
        self._reported: set[tuple[int, str]] = set()

    def look(self) -> None:
        """If it is time, compare the ranks' work per step since the last look."""
        if len(self._before) < 2 or time.monotonic() < self._next:
            return
        now, self._next = self.heartbeats.read(), time.monotonic() + EVERY_S
        if steps_between(self._before, now) < FEWEST_STEPS:
            return  # long steps: compare over a longer interval
        for rank, phase, own_s, usual_s in slower(self._before, now):
            if (rank, phase) not in self._reported:
                self._reported.add((rank, phase))
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
    """The steps that every rank has completed since."""
    return min(n.step - max(b.step, 0) for b, n in zip(before, now, strict=True))


def slower(before: list[Beat], now: list[Beat]) -> list[tuple[int, str, float, float]]:
    """(rank, phase, its seconds per step, the median of the others') for each that is slower."""
    steps = steps_between(before, now)
    if steps < FEWEST_STEPS:
        return []
    stragglers = []
    for phase in WORK:
        spent = [
            (n.seconds[phase] - b.seconds[phase]) / steps for b, n in zip(before, now, strict=True)
        ]
        for rank, seconds in enumerate(spent):
            usual = statistics.median(spent[:rank] + spent[rank + 1 :])
            if seconds > TIMES_SLOWER * usual and seconds - usual > LEAST_S:
                stragglers.append((rank, phase, seconds, usual))
    return stragglers
