"""What one run has measured, from what it left behind: a run folder of ours, or files of a peer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from allranks.job.run_folder import read_events, read_rows
from allranks.tools.bench.statistics import StepSpeeds, of_steps
from allranks.training.record.phases import MemoryPeaks, held_in

COMPUTE, EXCHANGE, INPUT = "compute", "exchange", "data"
PEER_STEPS, PEER_HELD = "steps.jsonl", "held-*.json"


@dataclass(frozen=True)
class Measured:
    """One run. The shares of time are of the whole run, over all ranks that recorded them.

    `sent_bytes` were counted, `card_bytes` are promised: of a step, by the busiest rank; of a peer
    nobody counts them. `peak_bytes` is of the process that held most. `until_s` is when the metric
    was reached, `joules` what the machine has taken meanwhile. What is not known is `None`.
    """

    turn: int
    steps: StepSpeeds
    step_s: float
    shares: dict[str, float]
    sent_bytes: float | None
    card_bytes: float | None
    weights_sha256: str
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    until_step: int | None = None
    until_s: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class Timed:
    """The steps that count, and the loss of every step."""

    steps: StepSpeeds
    step_s: float
    losses: tuple[float, ...]


def timed(
    rows: Sequence[Mapping[str, Any]],
    warm_up: int,
    skipped: set[int],
    *,
    ended_early: bool = False,
) -> Timed | str:
    """The times between rows after the warm-up; or why there are none.

    A step that an evaluation went before is in `skipped`: the time of both is in its row. A run
    that ended early, since it had reached what it was to, has half of its steps as warm-up.
    """
    losses = tuple(float(row["loss"]) for row in rows)
    if ended_early:
        warm_up = min(warm_up, len(rows) // 2)
    rows = rows[max(0, warm_up - 1) :]
    if len(rows) < 3:
        return f"it made {max(0, len(rows) - 1)} steps after the warm-up, of 2 at least"
    pairs = [(a, b) for a, b in pairwise(rows) if int(b["step"]) not in skipped]
    seconds = [float(b["monotonic"]) - float(a["monotonic"]) for a, b in pairs]
    samples = [float(b["samples"]) for _, b in pairs]
    if not pairs:
        return "an evaluation after every step: no step is timed alone"
    count = len(pairs)
    if min(seconds) <= 0:  # several steps were read at once
        samples, seconds = [sum(samples)], [sum(seconds)]
    return Timed(of_steps(samples, seconds), sum(seconds) / count, losses)


def measured_run(
    run_dir: Path, summary: Mapping[str, Any], warm_up: int, turn: int, joules: float | None
) -> tuple[Measured, tuple[float, ...]] | str:
    """What a run of ours has measured, and its losses; or why it has not."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "samples" in row]
    events = read_events(run_dir)
    evaluated = {int(e["step"]) for e in events if e["event"] == "evaluated"}
    early = bool(summary.get("ended_early"))
    found = timed(rows, warm_up, evaluated, ended_early=early)
    if isinstance(found, str):
        return found
    steps = max(1, int(summary["steps"]))
    sent, until = summary.get("sent_bytes"), summary.get("until") or {}
    peaks = held_in(events).values()
    measured = Measured(
        turn,
        found.steps,
        found.step_s,
        _shares(events),
        None if sent is None else float(sent["gradients"]) / steps,
        float(summary["card_bytes_per_step"] or 0),
        str(summary["weights_sha256"]),
        most(peaks, "host_bytes"),
        most(peaks, "device_bytes"),
        until.get("step"),
        until.get("seconds"),
        joules,
    )
    return measured, found.losses


def measured_peer(
    folder: Path, ranks: int, warm_up: int, turn: int, joules: float | None
) -> tuple[Measured, tuple[float, ...]] | str:
    """What a peer has measured, from the files that its processes wrote; or why it has not."""
    found = timed(list(read_rows(folder / PEER_STEPS)), warm_up, set())
    if isinstance(found, str):
        return found
    held = [MemoryPeaks(**json.loads(path.read_text())) for path in folder.glob(PEER_HELD)]
    if len(held) < ranks:
        return f"{len(held)} of {ranks} ranks came to the end"
    peaks = most(held, "host_bytes"), most(held, "device_bytes")
    measured = Measured(turn, found.steps, found.step_s, {}, None, None, "", *peaks, joules=joules)
    return measured, found.losses


def most(held: Any, which: str) -> int | None:
    """The largest of what is known."""
    known = [value for one in held if (value := getattr(one, which)) is not None]
    return max(known, default=None)


def _shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Which part of its steps ranks computed, exchanged, waited for input; empty: nobody said."""
    total = dict.fromkeys((COMPUTE, EXCHANGE, INPUT), 0.0)
    for event in events:
        seconds: dict[str, float] = event.get("seconds") or {} if event["event"] == "done" else {}
        for phase in total:
            total[phase] += float(seconds.get(phase, 0.0))
    whole = sum(total.values())
    return {phase: value / whole for phase, value in total.items()} if whole else {}
