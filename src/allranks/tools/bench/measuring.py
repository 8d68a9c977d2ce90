"""Runs the jobs of a plan, one after another, and reads what they measured from their run folders.

A job that fails is named with its reason, and left out of the turns that follow; others go on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.signals import Signals
from allranks.tools.bench.plan import Combination, Plan
from allranks.tools.bench.statistics import Steps, of_steps
from allranks.tools.sweep.packing import last_event, result_of
from allranks.tools.sweep.slots import start_command

TICK_S = 0.02
LAST_LINES = 4
COMPUTE, EXCHANGE, INPUT = "compute", "exchange", "data"


@dataclass(frozen=True)
class Measured:
    """One run. The shares of time are of the whole run, over all ranks that recorded them.

    `sent_bytes` were counted, `card_bytes` are promised: of a step, by the busiest rank.
    """

    turn: int
    steps: Steps
    step_s: float
    shares: dict[str, float]
    sent_bytes: float
    card_bytes: float
    weights_sha256: str


@dataclass
class Found:
    """What is known of a combination: what each of its runs measured, or why it has none."""

    combination: Combination
    runs: list[Measured] = field(default_factory=list)
    problem: str = ""


Tell = Callable[[Combination, int, Measured | str], None]


def measure(plan: Plan, refused: dict[Combination, str], folder: Path, tell: Tell) -> list[Found]:
    """Run all jobs of `plan`, turn by turn, in `folder`; `refused` ones are not run.

    A signal to stop ends the job that runs, and what was measured until then is returned.
    """
    found = {one: Found(one, problem=refused.get(one, "")) for one in plan.combinations}
    with Signals() as signals:
        for turn in range(plan.repeats):
            for combination in plan.turn(turn):
                one = found[combination]
                if one.problem or signals.reason:
                    continue
                run_dir = folder / f"turn-{turn}" / combination.name
                measured = _run(plan, combination, run_dir, signals, turn)
                if isinstance(measured, Measured):
                    one.runs.append(measured)
                elif not signals.reason:
                    one.problem = measured
                if not signals.reason:
                    tell(combination, turn, measured)
    return list(found.values())


def _run(
    plan: Plan, combination: Combination, run_dir: Path, signals: Signals, turn: int
) -> Measured | str:
    """What a run measured, or why it did not."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_suffix(".log")
    process = start_command([*plan.words_of(combination), "--run-dir", str(run_dir)], (), log)
    try:
        told = False
        while process.poll() is None:
            if signals.reason and not told:
                told = True
                process.send_signal(signal.SIGINT)
            time.sleep(TICK_S)
    finally:
        process.kill()
        process.wait()
    summary = result_of(run_dir) if run_dir.is_dir() else None
    if summary is None:
        return _why(run_dir, log)
    return _measured(run_dir, summary, plan, turn)


def _why(run_dir: Path, log: Path) -> str:
    """The first line of the report of a job that failed, or its last words."""
    if run_dir.is_dir():
        last = last_event(run_dir)
        if last["event"] == "failed":
            return str(last["report"]).splitlines()[0]
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return " ".join(line.strip() for line in lines) or "it left no word"


def _measured(run_dir: Path, summary: dict[str, Any], plan: Plan, turn: int) -> Measured | str:
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "samples" in row]
    rows = rows[max(0, plan.warm_up - 1) :]
    if len(rows) < 3:
        return f"it made {len(rows) - 1} steps after the warm-up, of 2 at least"
    seconds = [float(b["monotonic"]) - float(a["monotonic"]) for a, b in pairwise(rows)]
    samples = [float(row["samples"]) for row in rows[1:]]
    if min(seconds) <= 0:  # several steps were read at once
        samples, seconds = [sum(samples)], [sum(seconds)]
    steps = max(1, int(summary["steps"]))
    return Measured(
        turn,
        of_steps(samples, seconds),
        sum(seconds) / (len(rows) - 1),
        _shares(run_dir),
        float(summary["sent_bytes"]["gradients"]) / steps,
        float(summary["card_bytes_per_step"] or 0),
        str(summary["weights_sha256"]),
    )


def _shares(run_dir: Path) -> dict[str, float]:
    """Which part of its steps ranks computed, exchanged, waited for input; empty: nobody said."""
    total = dict.fromkeys((COMPUTE, EXCHANGE, INPUT), 0.0)
    for event in read_events(run_dir):
        seconds: dict[str, float] = event.get("seconds") or {} if event["event"] == "done" else {}
        for phase in total:
            total[phase] += float(seconds.get(phase, 0.0))
    whole = sum(total.values())
    return {phase: value / whole for phase, value in total.items()} if whole else {}
