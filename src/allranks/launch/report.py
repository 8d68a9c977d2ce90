"""The first-fault report: which rank failed first, where, and why; the victims are folded away.

Evidence is the exits in the order in which the kernel showed them, and the `failed` events that
ranks write before they leave. A rank whose collective broke because a peer went away says so
itself (`peer_lost`), and is named only when nobody else can be.
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import ProgramError, RequestError
from allranks.launch.supervisor import Ended
from allranks.record import rank_events_path, rank_log_path, read_rows


@dataclass(frozen=True)
class Fault:
    """One rank that did not end well; `event` is what it wrote itself, if it could."""

    rank: int
    code: int
    monotonic: float
    event: dict[str, Any] | None

    @property
    def is_victim(self) -> bool:
        return self.event is not None and bool(self.event.get("peer_lost"))


def first_fault(ended: Ended, run_dir: Path) -> Fault | None:
    """The fault that came first, causes before victims; `None` if every rank ended well."""
    faults = []
    for rank, ended_rank in ended.exits.items():
        event = _failed_event(run_dir, rank)
        if ended_rank.code == 0 or (rank in ended.stopped and event is None):
            continue
        when = min(ended_rank.monotonic, event["monotonic"] if event else ended_rank.monotonic)
        faults.append(Fault(rank, ended_rank.code, when, event))
    return min(faults, key=lambda fault: (fault.is_victim, fault.monotonic), default=None)


def error_of(fault: Fault, ended: Ended, run_dir: Path) -> RequestError | ProgramError:
    """The error that tells of this fault: a bad request found before the first update, or a report."""
    event = fault.event or {}
    if event.get("request") and not event.get("updates"):
        return RequestError.from_data(event["request"])
    return ProgramError(_report(fault, ended, run_dir))


def _failed_event(run_dir: Path, rank: int) -> dict[str, Any] | None:
    rows = read_rows(rank_events_path(run_dir, rank))
    return next((row for row in rows if row["event"] == "failed"), None)


def _report(fault: Fault, ended: Ended, run_dir: Path) -> str:
    event = fault.event or {}
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    lines = [f"rank {fault.rank} on {socket.gethostname()} failed first{step}: {_cause(fault)}"]
    if event.get("traceback"):
        lines += ["", event["traceback"].rstrip(), ""]
    others = sorted(rank for rank in ended.exits if rank != fault.rank)
    done = [rank for rank in others if ended.exits[rank].code == 0]
    victims = [rank for rank in others if rank not in done]
    if victims:
        lines.append(f"stopped because of it: rank {', '.join(map(str, victims))}")
    lines.append(f"its output: {rank_log_path(run_dir, fault.rank)}")
    return "\n".join(lines)


def _cause(fault: Fault) -> str:
    if fault.event is not None:
        return f"{fault.event['kind']}: {fault.event['message']}"
    if fault.code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-fault.code, f"signal {-fault.code}")
        return f"killed by {name}; it could leave no traceback"
    return f"it left with exit code {fault.code} without a word"
