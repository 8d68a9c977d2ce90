"""What each method costs in loss: beside `ddp`, after equal samples, on 4 ranks.

    python benchmarks/quality.py
    python benchmarks/quality.py --task char-GPT --seeds 1 --method ddp --method diloco:every=50
    python benchmarks/quality.py --task char-GPT --steps 6400 --set lr=4e-3
    python benchmarks/quality.py --join FIRST.json SECOND.json

`digits`, ResNet-20 on made-up images of CIFAR's shape, and a GPT on bytes (`sending_tasks.py`),
each method at the setting of its card, from `--seeds` seeds. The rate falls along a cosine to the
last step, as in every paper of these methods, and there are some tens of meetings of those that
meet rarely: one that has an outer momentum of 0.9 remembers the last ten. What is compared is of
one seed: the loss on held-out data at the end, over that of `ddp`; where there is an accuracy, that
of `ddp` over its own, because the losses of samples told right are almost nothing, and so are their
differences. The bar is 1.01 of the accuracy, else of the loss. `ddp` from the next seed stands
beside `ddp`: what a seed alone makes of it. Bytes are those that the busiest rank sent, counted.

It takes about an hour on two cores (an estimate); `--join` makes one record of those of parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from harness import (
    RECORDS,
    Comparison,
    Interval,
    finish_record,
    median_interval,
    say,
    start_record,
)
from trainings import METHODS, Ran, ran

BAR, FEWER_BYTES = 1.01, 1 / 146
AGAIN = "ddp, another seed"
FEWEST = ("diloco:every=50,bits=4", "sparse-loco:every=30", "sparse-loco:every=4")
"""Methods that are to send 146 times fewer bytes than `ddp`."""
MORE = ("diloco:every=50,bits=4", "sparse-loco:every=4")


@dataclass(frozen=True)
class Trained:
    """What is trained, for how long."""

    program: str
    steps: int
    settings: tuple[str, ...] = ()


TASKS = {
    "digits": Trained("digits", 420),
    "ResNet-20": Trained("ResNet20", 1600, ("batch_size=16", "total_steps=1600")),
    "char-GPT": Trained("CharGPT", 1600, ("width=64", "layers=2", "total_steps=1600")),
}
QUICK = {"digits": Trained("digits", 60)}


def main() -> None:
    """Train, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="digits alone, in a minute")
    parser.add_argument("--task", action="append", choices=TASKS, help="only this one")
    parser.add_argument("--method", action="append", help="only this one")
    parser.add_argument("--steps", type=int, help="instead of those of the task")
    parser.add_argument("--set", action="append", default=[], help="a setting of all of them")
    parser.add_argument("--seconds", type=float, default=inf, help="begin none after so long")
    parser.add_argument("--join", nargs="+", type=Path, help="records of parts: train nothing")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    tasks = QUICK if asked.quick else {n: TASKS[n] for n in asked.task or TASKS}
    seeds = min(2, asked.seeds) if asked.quick else asked.seeds
    methods = tuple(asked.method or (*METHODS, *MORE))
    if asked.join:
        ends = _joined(asked.join)
        parts = [json.loads(path.read_text())["settings"] for path in asked.join]
        record = start_record("quality", {"joined": parts})
    else:
        steps = {name: asked.steps or task.steps for name, task in tasks.items()}
        settings = {"seeds": seeds, "ranks": 4, "steps": steps, "methods": methods}
        settings |= {"first_seed": asked.first_seed, "set": asked.set}
        record = start_record("quality", settings)
        until = time.monotonic() + asked.seconds
        ends = {
            name: _trained(
                name,
                replace(task, settings=(*task.settings, *asked.set)),
                steps[name],
                methods,
                range(asked.first_seed, asked.first_seed + seeds),
                until,
            )
            for name, task in tasks.items()
        }
    found = [one for task, own in ends.items() for one in _beside_ddp(task, own)]
    record["rows"] = [_row(t, m, own) for t, its in ends.items() for m, own in its.items()]
    record["samples"] = [{"task": task, "ends": own} for task, own in ends.items()]
    finish_record(record, found, asked.records)


Ends = dict[str, list[dict[str, Any]]]
"""By method, one training for each seed: `metrics` at the end, `sent_bytes` of a step, `losses`."""


def _trained(
    name: str, task: Trained, steps: int, methods: tuple[str, ...], seeds: range, until: float
) -> Ends:
    """Trainings, of which none begins after `until`; methods that had none are left out."""
    ends: Ends = {method: [] for method in methods}
    settings = tuple(s if "total_steps" not in s else f"total_steps={steps}" for s in task.settings)
    for seed in seeds:
        for method in methods:
            if time.monotonic() > until:
                continue
            ends[method].append(_end_of(ran(task.program, method, seed, steps, settings)))
            say(f"{name}, seed {seed}, {method}: {ends[method][-1]['metrics']}")
    return {method: own for method, own in ends.items() if own}


def _end_of(run: Ran) -> dict[str, Any]:
    losses = [(step, metrics["loss"]) for step, metrics in run.evaluations]
    return {
        "metrics": run.evaluations[-1][1],
        "sent_bytes": run.sent_bytes,
        "losses": losses,
    }


def _joined(paths: list[Path]) -> dict[str, Ends]:
    """All trainings of the parts, those of one method on one task in the order of the parts."""
    ends: dict[str, Ends] = {}
    for path in paths:
        for sample in json.loads(path.read_text())["samples"]:
            known = ends.setdefault(sample["task"], {})
            for method, own in sample["ends"].items():
                known.setdefault(method, []).extend(own)
    return ends


def _beside_ddp(task: str, ends: Ends) -> list[Comparison]:
    usual = ends["ddp"]
    others = {method: own for method, own in ends.items() if method != "ddp"}
    if len(usual) > 1:
        others[AGAIN] = usual[1:] + usual[:1]
    has_accuracy = "accuracy" in usual[0]["metrics"]
    found = []
    for method, own in others.items():
        pairs = [(m["metrics"], u["metrics"]) for m, u in zip(own, usual, strict=False)]
        losses = median_interval([mine["loss"] / its["loss"] for mine, its in pairs])
        bar = None if method == AGAIN else BAR
        on_loss = None if has_accuracy else bar
        found.append(Comparison(task, "ratio", "loss", method, "ddp", losses, on_loss))
        if has_accuracy:
            right = median_interval([its["accuracy"] / mine["accuracy"] for mine, its in pairs])
            found.append(Comparison(task, "ratio", "accuracy", "ddp", method, right, bar))
        if method != AGAIN:
            ratio = own[0]["sent_bytes"] / usual[0]["sent_bytes"]
            counted = Interval(ratio, ratio, ratio, confidence=1.0, pairs=1)
            least = FEWER_BYTES if method in FEWEST else None
            found.append(Comparison(task, "ratio", "sent_bytes", method, "ddp", counted, least))
    return found


def _row(task: str, method: str, ends: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: medians over the seeds, and how far losses are apart."""
    losses = [end["metrics"]["loss"] for end in ends]
    accuracy = [e["metrics"]["accuracy"] for e in ends if "accuracy" in e["metrics"]]
    return {
        "what": task,
        "contender": method,
        "loss": statistics.median(losses),
        "loss_spread": max(losses) - min(losses),
        "accuracy": statistics.median(accuracy) if accuracy else None,
        "sent_kb_per_step": ends[0]["sent_bytes"] / 1e3,
    }


if __name__ == "__main__":
    main()
