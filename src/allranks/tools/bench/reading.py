"""Reads the measurements of one run, from our run folder or the files of a peer."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from allranks.job.run_folder import read_events, read_rows
from allranks.training.record.phases import MemoryPeaks, held_in

COMPUTE, EXCHANGE, INPUT = "compute", "exchange", "data"
SAMPLES_PER_S, STEPS_PER_S, RUNS_PER_HOUR = "samples/s", "steps/s", "runs/hour"
PEER_STEPS, PEER_HELD = "steps.jsonl", "held-*.json"


@dataclass(frozen=True)
class Measured:
    """One run. The shares of time are of the whole run, over all ranks that recorded them.

    `sent_bytes` were counted, `card_bytes` are promised: per step, of the busiest rank; unknown for
    a peer. `peak_bytes` is of the largest process. `until_s` is the time to the metric, `joules`
    the energy of the machine during the run. Unknown values are `None`.
    """

    turn: int
    steps: StepSpeeds
    step_s: float
    shares: dict[str, float] = field(default_factory=dict)
    sent_bytes: float | None = None
    card_bytes: float | None = None
    weights_sha256: str = ""
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    until_step: int | None = None
    until_s: float | None = None
    joules: float | None = None
    unit: str = SAMPLES_PER_S
    """What `steps` counts: a script without samples or steps is timed by the next larger unit."""
    step_samples: float | None = None
    is_apart: bool = False
    """Whether several ranks of a script trained without a process group of torch."""


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

    `skipped` are steps after an evaluation, whose row includes the evaluation's time. In a run that
    ended early, because it reached its metric, at most half of the steps are warm-up.
    """
    losses = tuple(float(row["loss"]) for row in rows if "loss" in row)
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
    """The measurements of our run, and its losses; or why there are none."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "samples" in row]
    events = read_events(run_dir)
    evaluated = {int(e["step"]) for e in events if e["event"] == "evaluated"}
    early = bool(summary.get("ended_early"))
    times = timed(rows, warm_up, evaluated, ended_early=early)
    if isinstance(times, str):
        return times
    steps = max(1, int(summary["steps"]))
    sent_bytes, until = summary.get("sent_bytes"), summary.get("until") or {}
    peaks = held_in(events).values()
    measured = Measured(
        turn,
        times.steps,
        times.step_s,
        _shares(events),
        None if sent_bytes is None else float(sent_bytes["gradients"]) / steps,
        float(summary["card_bytes_per_step"] or 0),
        str(summary["weights_sha256"]),
        most(peaks, "host_bytes"),
        most(peaks, "device_bytes"),
        until.get("step"),
        until.get("seconds"),
        joules,
    )
    return measured, times.losses


def measured_peer(
    folder: Path, ranks: int, warm_up: int, turn: int, joules: float | None
) -> tuple[Measured, tuple[float, ...]] | str:
    """The measurements of a peer, from the files of its processes; or why there are none."""
    times = timed(list(read_rows(folder / PEER_STEPS)), warm_up, set())
    if isinstance(times, str):
        return times
    per_rank = [MemoryPeaks(**json.loads(path.read_text())) for path in folder.glob(PEER_HELD)]
    if len(per_rank) < ranks:
        return f"{len(per_rank)} of {ranks} ranks came to the end"
    measured = Measured(
        turn,
        times.steps,
        times.step_s,
        peak_bytes=most(per_rank, "host_bytes"),
        device_peak_bytes=most(per_rank, "device_bytes"),
        joules=joules,
    )
    return measured, times.losses


def most(peaks: Any, which: str) -> int | None:
    """The largest known value; `None` if all are unknown."""
    known = [value for peak in peaks if (value := getattr(peak, which)) is not None]
    return max(known, default=None)


def _shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The shares of time for compute, exchange and input; empty if no rank recorded them."""
    total = dict.fromkeys((COMPUTE, EXCHANGE, INPUT), 0.0)
    for event in events:
        seconds: dict[str, float] = event.get("seconds") or {} if event["event"] == "done" else {}
        for phase in total:
            total[phase] += float(seconds.get(phase, 0.0))
    whole = sum(total.values())
    return {phase: value / whole for phase, value in total.items()} if whole else {}


# --- statistics ----------------------------------------------------------------------------------
# Statistics of step times: speed, its uncertainty, and the jitter of steps. Pure arithmetic.
#
# Within a run, as tf_cnn_benchmarks counts: with B samples in each of n steps of times t,
#
#     speed = B / mean(t)  ± std(B / t) / sqrt(n)   jitter = 1.4826 · median |B/t - median(B/t)|
#
# Steps of one run are not independent: runs differ by more than their steps suggest. So repeats are
# compared: an interval is Student's for the mean of the repeats, and a ratio is taken turn by turn,
# between consecutive runs.


MAD_TO_STD = 1.4826
STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Of the two-sided 95 % interval, by degrees of freedom from 1."""
STUDENT_BEYOND = 2.086


@dataclass(frozen=True)
class StepSpeeds:
    """Of the steps of one run, in samples per second."""

    speed: float
    uncertainty: float
    jitter: float


def of_steps(samples: Sequence[float], seconds: Sequence[float]) -> StepSpeeds:
    """The speed of steps with so many `samples` that took so many `seconds` each."""
    speeds = [b / t for b, t in zip(samples, seconds, strict=True)]
    middle = statistics.median(speeds)
    jitter = MAD_TO_STD * statistics.median(abs(speed - middle) for speed in speeds)
    uncertainty = statistics.pstdev(speeds) / math.sqrt(len(speeds))
    return StepSpeeds(sum(samples) / sum(seconds), uncertainty, jitter)


@dataclass(frozen=True)
class Interval:
    """The mean of `repeats` measurements and its 95 % interval; for one repeat it is infinite."""

    mean: float
    low: float
    high: float
    repeats: int

    def agrees_with(self, other: Interval) -> bool:
        """Whether the intervals have a value in common."""
        return self.low <= other.high and other.low <= self.high


def interval(values: Sequence[float]) -> Interval:
    """The interval of independent measurements of one quantity."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    student = STUDENT_95[count - 2] if count - 2 < len(STUDENT_95) else STUDENT_BEYOND
    reach = student * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach, count)


def ratio(of: Sequence[float], over: Sequence[float]) -> Interval:
    """The ratio of `of` to `over`, turn by turn."""
    return interval([a / b for a, b in zip(of, over, strict=True)])
