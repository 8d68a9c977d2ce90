"""What each method costs in loss: beside `ddp`, after equal samples, on 4 ranks.

    python benchmarks/quality.py
    python benchmarks/quality.py --quick

`digits`, ResNet-20 on made-up images of CIFAR's shape, and a GPT on bytes (`sending_tasks.py`),
each method at the setting of its card, from `--seeds` seeds. What is compared is of one seed: the
loss on held-out data at the end, over that of `ddp`; where there is an accuracy, that of `ddp` over
its own, because the losses of samples told right are almost nothing, and so are their differences.
The bar is 1.01 of the accuracy, else of the loss. `ddp` from the next seed stands beside `ddp`:
what a seed alone makes of it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, median_interval, say, start_record
from trainings import METHODS, losses_of

TASKS = {"digits": ("digits", 420), "ResNet-20": ("ResNet20", 400), "char-GPT": ("CharGPT", 400)}
"""Of each task its program and its steps."""
QUICK = {"digits": ("digits", 60)}
BAR = 1.01
AGAIN = "ddp, another seed"


def main() -> None:
    """Train, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--quick", action="store_true", help="digits alone, in a minute")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    tasks = QUICK if asked.quick else TASKS
    seeds = min(2, asked.seeds) if asked.quick else asked.seeds
    settings = {"seeds": seeds, "ranks": 4, "steps": {name: row[1] for name, row in tasks.items()}}
    record = start_record("quality", settings)
    found: list[Comparison] = []
    record["rows"], record["samples"] = [], []
    for task, (program, steps) in tasks.items():
        ends: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
        for seed in range(seeds):
            for method in METHODS:
                ends[method].append(losses_of(program, method, seed, steps)[-1][1])
            losses = "  ".join(f"{m} {own[-1]['loss']:.4f}" for m, own in ends.items())
            say(f"{task}, seed {seed}: {losses}")
        found += _beside_ddp(task, ends)
        record["rows"] += [_row(task, method, own) for method, own in ends.items()]
        record["samples"].append({"task": task, "ends": ends})
    finish_record(record, found, asked.records)


def _beside_ddp(task: str, ends: dict[str, list[dict[str, float]]]) -> list[Comparison]:
    usual = ends["ddp"]
    others = {method: own for method, own in ends.items() if method != "ddp"}
    if len(usual) > 1:
        others[AGAIN] = usual[1:] + usual[:1]
    has_accuracy = "accuracy" in usual[0]
    found = []
    for method, own in others.items():
        pairs = list(zip(own, usual, strict=True))
        losses = median_interval([mine["loss"] / its["loss"] for mine, its in pairs])
        bar = None if method == AGAIN else BAR
        on_loss = None if has_accuracy else bar
        found.append(Comparison(task, "ratio", "loss", method, "ddp", losses, on_loss))
        if has_accuracy:
            right = median_interval([its["accuracy"] / mine["accuracy"] for mine, its in pairs])
            found.append(Comparison(task, "ratio", "accuracy", "ddp", method, right, bar))
    return found


def _row(task: str, method: str, ends: list[dict[str, float]]) -> dict[str, Any]:
    """A line of the table: medians over the seeds, and how far losses are apart."""
    losses = [metrics["loss"] for metrics in ends]
    accuracy = [metrics["accuracy"] for metrics in ends if "accuracy" in metrics]
    return {
        "what": task,
        "contender": method,
        "loss": statistics.median(losses),
        "loss_spread": max(losses) - min(losses),
        "accuracy": statistics.median(accuracy) if accuracy else None,
    }


if __name__ == "__main__":
    main()
