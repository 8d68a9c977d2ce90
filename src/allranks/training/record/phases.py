"""`--log phases`: when each rank was in which phase of its first steps, to the microsecond.

    phases/rank-RRR.jsonl   a line for each step: {"step", "attempt", "from", "spans"}

`from` is the monotonic clock at which the step began, which is where the one before it ended; a
span is [phase, microseconds from there, microseconds long], phases as `heartbeat.PHASES` counts
them. Only the first `MOST_STEPS` steps of an attempt are written, so that a file stays small.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.job.run_folder import JsonLines
from allranks.launcher.heartbeat import PHASES, Heartbeat

NAME = "phases"
MOST_STEPS = 2000
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}


def phases_path(run_dir: Path, rank: int) -> Path:
    return run_dir / NAME / f"rank-{rank:03d}.jsonl"


class PhaseRecord:
    """Watches the heartbeat of one rank; each rank has its own, and none communicates."""

    def __init__(self, run_dir: Path, rank: int, attempt: int, heartbeat: Heartbeat) -> None:
        """Watch from now on: a step is about to begin."""
        path = phases_path(run_dir, rank)
        path.parent.mkdir(exist_ok=True)
        self._file = JsonLines(path)
        self._attempt, self._heartbeat = attempt, heartbeat
        self._from = time.monotonic()
        self._spans: list[tuple[int, float, float]] = []
        self._steps = 0
        heartbeat.watch = self._left

    def on_step(self, step: int) -> None:
        """`step` global batches were made before the one that is over now."""
        if self._heartbeat.watch is None:
            return
        now = time.monotonic()
        self._left(self._heartbeat.phase, self._heartbeat.since, now)
        began = self._from
        spans = [
            [number, round(1e6 * (start - began)), round(1e6 * (end - start))]
            for number, start, end in self._spans
        ]
        row = {"step": step, "attempt": self._attempt, "from": began, "spans": spans}
        self._file.row(row)
        self._spans.clear()
        self._from = now
        self._steps += 1
        if self._steps == MOST_STEPS:
            self.close()

    def close(self) -> None:
        """Watch no longer; what a full disk did not take is lost: it is no result."""
        if self._heartbeat.watch is not None:
            self._heartbeat.watch = None
            self._file.close_with_unwritten()

    def _left(self, phase: str, since: float, now: float) -> None:
        """A phase is over, or a step in the midst of it."""
        start, number = max(since, self._from), _NUMBER[phase]
        if self._spans and self._spans[-1][0] == number and self._spans[-1][2] >= start:
            start = self._spans.pop()[1]
        self._spans.append((number, start, now))


# --- held ----------------------------------------------------------------------------------------
# The most memory that a process has had in use at once, since it began: of the host, of a device.
#
# Each rank says it with its event `done` or `stopped`, a process of another role in an event of its
# own. On the host it is what the kernel has counted
# (`VmHWM`): memory of its own, and pages that it shares with others, which are counted in each of
# them. So ranks that come from one fork server all count the libraries that it has loaded.


STATUS = Path("/proc/self/status")
PEAK = "VmHWM:"
ENDS = ("done", "stopped", "held")


@dataclass(frozen=True)
class MemoryPeaks:
    """The peaks of one process in bytes; `None` where nobody counts."""

    host_bytes: int | None
    device_bytes: int | None = None

    def to_data(self) -> dict[str, int | None]:
        """For an event."""
        return asdict(self)


def held_at_most(device_bytes: int | None = None, status: Path = STATUS) -> MemoryPeaks:
    """The peaks of this process; what it held on its device, the caller says."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        lines = []
    peaks = [line.split() for line in lines if line.startswith(PEAK)]
    return MemoryPeaks(int(peaks[0][1]) * 1024 if peaks else None, device_bytes)


def held_in(events: Iterable[dict[str, Any]]) -> dict[int, MemoryPeaks]:
    """The peaks of each rank by its last word in `events`; those that said nothing are left out."""
    peaks: dict[int, MemoryPeaks] = {}
    for event in events:
        memory = event.get("memory")
        if event["event"] in ENDS and event["rank"] is not None and memory:
            peaks[event["rank"]] = MemoryPeaks(memory["host_bytes"], memory["device_bytes"])
    return peaks
