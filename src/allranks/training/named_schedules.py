"""Schedules by name, as a job says them: DeepSpeed's, as its engine steps them.

DeepSpeed sets the rate of the first update when the scheduler is made, and that of update u, from
1, by the formula at i = u - 1. So the first update has the lowest rate (0 under the cosine), and
so has the second one under `log`. `lr` is the optimizer's own rate: what is returned are factors.
"""

from __future__ import annotations

import math
from typing import Any

from allranks.job.deepspeed.recipe import OPTIMIZERS, SCHEDULES, read_recipe


def factor_of(schedule: str, optimizer: str, update: int) -> float:
    """The factor on the rate of `optimizer` for an update of the job, counted from 0."""
    lr = float(read_recipe("--optimizer", optimizer, OPTIMIZERS).options["lr"])
    picked = read_recipe("--schedule", schedule, SCHEDULES)
    return rate(picked.name, picked.options, lr, update) / lr


def rate(name: str, options: dict[str, Any], lr: float, update: int) -> float:
    """The rate of an update, for an optimizer whose own is `lr`."""
    done = _risen(options, update - 1) if update else 0.0
    if name == "warmup-cosine-lr":
        first = options["lowest_ratio"]
        ratio = _cosine(options, update - 1) if done is None else first + (1 - first) * done
        return float(lr * ratio) if update else 0.0
    lowest, highest = options["lowest"], options["highest"]
    if done is None:
        done = _fallen(options, update - 1) if name == "warmup-decay-lr" else 1.0
    return float(lowest + (highest - lowest) * done)


def _risen(options: dict[str, Any], i: int) -> float | None:
    """Which part of the warm-up is done at i; `None` after it."""
    span = max(options["steps"], 2)  # ln(1) would divide by 0
    if i >= span:
        return None
    return math.log(i + 1) / math.log(span) if options["kind"] == "log" else i / span


def _fallen(options: dict[str, Any], i: int) -> float:
    """A straight line from 1 at the end of the warm-up to 0 at `total`."""
    span = max(options["steps"], 2)
    return float(max(0.0, (options["total"] - i) / max(1.0, options["total"] - span)))


def _cosine(options: dict[str, Any], i: int) -> float:
    span = max(options["steps"], 2)
    done = min(1.0, (i - span + 1) / max(1, options["total"] - span))
    end = options["end_ratio"]
    return float(end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)
