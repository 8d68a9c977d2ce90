"""How long ranks of a pipeline wait: each schedule beside its own formula, with stages of sleep.

    python benchmarks/pipeline_bubble.py

Every layer sleeps as long in forward, for the gradient of its input and for that of its weight, so
all stages take equally long and need no core. The bubble is the part of a step of 4 ranks and 8
micro-batches in which the layers of a rank do not sleep, on the mean of the ranks: what they wait,
and all that the engine does. The formula is (N-1)/(vm+N-1), with v = 3 for zero-bubble. A step is
timed from one to the next; the median of a run counts, and runs of the schedules take turns.
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

RANKS, MICROS, LAYERS, STEPS = 4, 8, 8, 2
FORWARD_S = 0.16  # of one layer; backward takes twice as long
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved:chunks=2": 2, "zero-bubble": 1}
BAR = 1.15  # of the formula


def rank_of(rank: int, folder: str, strategy: str) -> None:
    """What a rank does is in `pipeline_rank`, which imports torch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    work: Any = importlib.import_module("pipeline_rank")
    sizes = {"ranks": RANKS, "micros": MICROS, "layers": LAYERS, "steps": STEPS}
    work.train(rank, folder, strategy, forward_s=FORWARD_S, **sizes)


def bubble_of(strategy: str) -> float:
    """The bubble of the median step of one run."""
    with tempfile.TemporaryDirectory(prefix="benchmark-pipeline-") as folder:
        preload = ("allranks.torch.worker", "allranks.torch.preload")
        wait_for(strategy, start_ranks(RANKS, rank_of, (folder, strategy), preload))
        ranks = [json.loads(Path(folder, f"steps-{r}.json").read_text()) for r in range(RANKS)]
    steps = zip(*ranks, strict=True)
    return statistics.median(
        1 - sum(s for _, s in step) / sum(t for t, _ in step) for step in steps
    )


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each schedule")
    rounds = parser.parse_args().rounds
    settings = {"ranks": RANKS, "micro_batches": MICROS, "forward_s": FORWARD_S, "steps": STEPS}
    record = start_record("pipeline_bubble", settings)
    found: dict[str, list[float]] = {strategy: [] for strategy in SCHEDULES}
    for turn in range(rounds):
        for strategy in order_of(list(SCHEDULES), turn):
            found[strategy].append(bubble_of(strategy))
        say(f"round {turn + 1} of {rounds}")
    comparisons = []
    for strategy, chunks in SCHEDULES.items():
        parts = 3 if strategy == "zero-bubble" else chunks
        formula = (RANKS - 1) / (parts * MICROS + RANKS - 1)
        ratios = [bubble / formula for bubble in found[strategy]]
        middle = statistics.median(found[strategy])
        say(f"{strategy}: formula {formula:.3f}, measured {middle:.3f}")
        interval = median_interval(ratios)
        of, over = strategy, "formula"
        comparisons.append(Comparison("bubble", "ratio", "fraction", of, over, interval, BAR))
    record["samples"] = found
    finish_record(record, comparisons, RECORDS)


if __name__ == "__main__":
    main()
