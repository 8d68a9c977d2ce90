"""A step whose branches sleep: on ranks of their own it takes as long as the slowest one.

    python benchmarks/branches.py

Three branches of one model sleep, each its own time in forward and twice that in backward, so none
needs a core. In one process a step takes their sum, on three ranks the longest of them, and what
the ranks tell each other. The median step of a run counts; the two take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, median_interval, order_of, say, start_record
from ranks import start_ranks, wait_for

HEADS_S = [0.05, 0.1, 0.15]  # in forward; backward takes twice as long
STEPS = 6
RANKS = {"single": 1, "branches": len(HEADS_S)}
BUSY_S = {"single": 3 * sum(HEADS_S), "branches": 3 * max(HEADS_S)}
BAR = 1.1  # of the sleep of the slowest rank


def rank_of(rank: int, folder: str, strategy: str) -> None:
    """What a rank does is in `pipeline_rank`, which imports torch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    work: Any = importlib.import_module("pipeline_rank")
    task = work.SleepingBranches(heads=HEADS_S, batch_size=8, shards=1, epochs=100)
    work.timed_steps(rank, folder, strategy, task, ranks=RANKS[strategy], steps=STEPS)


def seconds_of_a_step(strategy: str) -> float:
    """The median step of one run."""
    with tempfile.TemporaryDirectory(prefix="benchmark-branches-") as folder:
        preload = ("allranks.torch.worker", "allranks.torch.preload")
        ranks = RANKS[strategy]
        wait_for(strategy, start_ranks(ranks, rank_of, (folder, strategy), preload))
        steps = json.loads(Path(folder, f"steps-{ranks - 1}.json").read_text())
    return statistics.median(seconds for seconds, _ in steps)


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="runs of each strategy")
    rounds = parser.parse_args().rounds
    record = start_record("branches", {"ranks": RANKS, "heads_s": HEADS_S, "steps": STEPS})
    found: dict[str, list[float]] = {strategy: [] for strategy in RANKS}
    for turn in range(rounds):
        for strategy in order_of(list(RANKS), turn):
            found[strategy].append(seconds_of_a_step(strategy))
        say(f"round {turn + 1} of {rounds}")
    comparisons = []
    for strategy, busy in BUSY_S.items():
        say(f"{strategy}: sleeps {busy:.3f} s, a step {statistics.median(found[strategy]):.3f} s")
        interval = median_interval([step / busy for step in found[strategy]])
        over = "sleep of the slowest rank"
        comparisons.append(Comparison("step", "ratio", "step_s", strategy, over, interval, BAR))
    record["samples"] = found
    finish_record(record, comparisons, RECORDS)


if __name__ == "__main__":
    main()
