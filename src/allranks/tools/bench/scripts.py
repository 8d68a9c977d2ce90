"""Times an unchanged script: `allranks run` starts it, and its own steps are read.

A recorder in each rank writes the time and the samples of every step (`script_check/record/
timing.py`). A script without such steps, as of another framework, is timed as a whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.job.run_folder import read_events
from allranks.launcher.scripts.on_path import path_with_hooks
from allranks.tools.bench.plan import BenchPlan, Combination
from allranks.tools.bench.reading import (
    RUNS_PER_HOUR,
    SAMPLES_PER_S,
    STEPS_PER_S,
    Measured,
    StepSpeeds,
    timed,
)
from allranks.tools.script_check.rules.facts import Fact, read_facts

TIMED_IN = "ALLRANKS_TIMED"
THREADS = "OMP_NUM_THREADS"
LEAST_STEPS = 4
GRACE_S = 5
FOR_TASKS = ("strategy", "share", "sweep", "peers", "until", "scaling", "batch_size")
"""Options of `bench` that choose what a script decides itself."""


def check_options(names: Sequence[str]) -> None:
    """Raise `RequestError` if one of these options is for tasks alone."""
    for name in names:
        if name in FOR_TASKS:
            option = f"--{name.replace('_', '-')}"
            raise RequestError(
                asked=f"bench {option} … -- COMMAND",
                found="a command after `--`, so a script",
                why="a script decides itself how it trains and with which batch; "
                f"{option} is for tasks",
                do=f"leave {option} out, or give the script's own arguments after its name",
            )


def script_words(plan: BenchPlan, combination: Combination, run_dir: Path) -> list[str]:
    """The arguments of `allranks run` for one run of the script."""
    words = ["--ranks", str(combination.ranks), "--run-dir", str(run_dir)]
    words += ["--time-limit", str(math.ceil(plan.peer_limit_s)), "--grace", str(GRACE_S)]
    return [*words, "--", *plan.command]


def timed_environment(
    plan: BenchPlan, folder: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a run whose ranks write their steps to `folder`.

    Each rank has as many threads on any number of ranks, unless OMP_NUM_THREADS is set already.
    """
    most = max(combination.ranks for combination in plan.combinations)
    threads = max(1, len(os.sched_getaffinity(0)) // most)
    hooks = {"PYTHONPATH": path_with_hooks(inherited), TIMED_IN: str(folder)}
    return {THREADS: str(threads), **inherited, **hooks}


def steps_made(folder: Path, ranks: int) -> int:
    """The number of steps that all ranks have made so far."""
    texts = [path.read_bytes() for path in folder.glob("*.jsonl")]
    counts = [text.count(b'"fact": "step"') for text in texts]
    return min(counts) if len(counts) >= ranks else 0


def measured_script(
    folder: Path, run_dir: Path, plan: BenchPlan, turn: int, joules: float | None
) -> tuple[Measured, tuple[float, ...]] | str:
    """The measurements of a run by its steps, or by its whole time; or why there are none."""
    ranks = _steps_of_ranks(folder)
    rows = _rows(ranks)[: plan.warm_up + plan.steps]
    peak = max((int(step["host_bytes"]) for steps in ranks for step in steps), default=None)
    if len(rows) < min(LEAST_STEPS, plan.warm_up + plan.steps):
        return _measured_whole(run_dir, turn, peak, joules)
    unit = STEPS_PER_S
    if all(row["samples"] is not None for row in rows) and any(row["samples"] for row in rows):
        unit = SAMPLES_PER_S
    else:
        rows = [{**row, "samples": 1} for row in rows]
    evaluated = {int(row["step"]) for row in rows if row["evaluated"]}
    times = timed(rows, plan.warm_up, evaluated, ended_early=True)
    if isinstance(times, str):
        return times
    each = times.steps.speed * times.step_s if unit == SAMPLES_PER_S else None
    measured = Measured(
        turn,
        times.steps,
        times.step_s,
        peak_bytes=peak,
        joules=joules,
        unit=unit,
        step_samples=each,
        is_apart=len(ranks) > 1 and not any(step["joined"] for steps in ranks for step in steps),
    )
    return measured, ()


def _measured_whole(
    run_dir: Path, turn: int, peak: int | None, joules: float | None
) -> tuple[Measured, tuple[float, ...]]:
    """Of a script without steps of torch: the time from the start of its ranks to their end."""
    events = read_events(run_dir)
    begun = [float(e["monotonic"]) for e in events if e["event"] == "attempt"][-1]
    seconds = float(events[-1]["monotonic"]) - begun
    speeds = StepSpeeds(3600 / seconds, 0.0, 0.0)
    whole = Measured(turn, speeds, seconds, peak_bytes=peak, joules=joules, unit=RUNS_PER_HOUR)
    return whole, ()


def _steps_of_ranks(folder: Path) -> list[list[Fact]]:
    """The steps of each rank, by rank; of several processes of a rank, of the one with most."""
    by_rank: dict[int, list[Fact]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        steps: list[Fact] = [fact for fact in read_facts(path) if fact["fact"] == "step"]
        if steps and len(steps) > len(by_rank.get(int(steps[-1]["rank"]), ())):
            by_rank[int(steps[-1]["rank"])] = steps
    return [steps for _, steps in sorted(by_rank.items())]


def _rows(ranks: Sequence[Sequence[Fact]]) -> list[dict[str, Any]]:
    """The steps that all ranks made, by the clock of the first; samples are those of all ranks."""
    rows = []
    for steps in zip(*ranks, strict=False):
        samples = [step["samples"] for step in steps]
        rows.append(
            {
                **steps[0],
                "samples": None if None in samples else sum(samples),
                "evaluated": any(step["evaluated"] for step in steps),
            }
        )
    return rows
