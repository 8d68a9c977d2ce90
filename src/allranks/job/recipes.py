"""Optimizers and schedules that a job names in place of its task's: options and rates. Pure.

`--optimizer adamw:lr=1e-3,weight_decay=0.01` updates all trained parameters in one group;
`--schedule warmup-lr:highest=1e-3,steps=1000` sets its rate as DeepSpeed's engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from allranks.errors import RequestError, nearest
from allranks.strategies.card import Option, Picked, read_all
from allranks.strategies.choice import parse_choice

LR = Option("lr", 1e-3, "the rate of every update, before the schedule", above=0)
DECAY = Option("weight_decay", 0.0, "part of the weights that is taken off", at_least=0)
MOMENTS = (
    Option("beta1", 0.9, "how much the first moment keeps", at_least=0, below=1),
    Option("beta2", 0.999, "how much the second moment keeps", at_least=0, below=1),
    Option("eps", 1e-8, "is added to the root of the second moment", at_least=0),
)
OPTIMIZERS: dict[str, tuple[Option, ...]] = {
    "adam": (LR, *MOMENTS, DECAY),
    "adamw": (LR, *MOMENTS, DECAY),
    "sgd": (
        LR,
        Option("momentum", 0.0, "how much of the last update goes on", at_least=0),
        Option("nesterov", False, "look ahead by the momentum"),
        DECAY,
    ),
}


# --- schedules -----------------------------------------------------------------------------------
# DeepSpeed sets the rate of the first update when the scheduler is made, and that of update u, from
# 1, by the formula at i = u - 1. So i is -1 for the first update, which has the lowest rate (0
# under the cosine), and so has the second one under `log`.


def warmup_done(options: Mapping[str, Any], i: int) -> float | None:
    """Which part of the warm-up is done at i; `None` after it."""
    span = max(options["steps"], 2)  # ln(1) would divide by 0
    if not 0 <= i < span:
        return 0.0 if i < 0 else None
    return math.log(i + 1) / math.log(span) if options["kind"] == "log" else i / span


def _warmup(options: Mapping[str, Any], lr: float, i: int, after: float = 1.0) -> float:
    done = warmup_done(options, i)
    lowest, highest = options["lowest"], options["highest"]
    return float(lowest + (highest - lowest) * (after if done is None else done))


def _decay(options: Mapping[str, Any], lr: float, i: int) -> float:
    """After the warm-up a straight line to 0 at `total`."""
    span = max(options["steps"], 2)
    remaining = max(0.0, (options["total"] - i) / max(1.0, options["total"] - span))
    return _warmup(options, lr, i, after=remaining)


def _cosine(options: Mapping[str, Any], lr: float, i: int) -> float:
    """After the warm-up half a cosine to `end_ratio` at `total`."""
    if i < 0:
        return 0.0
    done = warmup_done(options, i)
    if done is not None:
        first = options["lowest_ratio"]
        return float(lr * (first + (1 - first) * done))
    span = max(options["steps"], 2)
    part = min(1.0, (i - span + 1) / max(1, options["total"] - span))
    end = options["end_ratio"]
    return float(lr * (end + (1 - end) * (1 + math.cos(math.pi * part)) / 2))


class NamedSchedule(NamedTuple):
    """`rate(options, lr, i)` follows from the optimizer's own rate `lr`.

    `deepspeed` is its type in ds_config, and `params` are its parameters there -> our options.
    """

    options: tuple[Option, ...]
    rate: Callable[[Mapping[str, Any], float, int], float]
    deepspeed: str
    params: Mapping[str, str]


RATES = (
    Option("lowest", 0.0, "the rate of the first update", at_least=0),
    Option("highest", 1e-3, "the rate after the warm-up", above=0),
)
RATIOS = (
    Option("lowest_ratio", 0.0, "the first part of the optimizer's rate", at_least=0),
    Option("end_ratio", 1e-4, "its last part", at_least=0),
)
KIND = Option("kind", "log", "how it rises", ("log", "linear"))
RISE = (Option("steps", 1000, "updates until the highest rate", at_least=1), KIND)
FALL = (*RISE, Option("total", 10_000, "updates until the end of the fall", at_least=1))
OF_RATES = {"warmup_min_lr": "lowest", "warmup_max_lr": "highest"}
OF_RATIOS = {"warmup_min_ratio": "lowest_ratio", "cos_min_ratio": "end_ratio"}
OF_RISE = {"warmup_num_steps": "steps", "warmup_type": "kind"}
OF_FALL = {**OF_RISE, "total_num_steps": "total"}
REQUIRED = ("warmup_max_lr", "total_num_steps")
"""Parameters without a default, where a schedule has them."""
SCHEDULES = {
    "warmup-lr": NamedSchedule((*RATES, *RISE), _warmup, "WarmupLR", OF_RATES | OF_RISE),
    "warmup-decay-lr": NamedSchedule((*RATES, *FALL), _decay, "WarmupDecayLR", OF_RATES | OF_FALL),
    "warmup-cosine-lr": NamedSchedule(
        (*RATIOS, *FALL), _cosine, "WarmupCosineLR", OF_RATIOS | OF_FALL
    ),
}
SCHEDULE_OPTIONS = {name: schedule.options for name, schedule in SCHEDULES.items()}


def factor_of(schedule: str, optimizer: str, update: int) -> float:
    """The factor on the rate of `optimizer` for an update of the job, counted from 0."""
    lr = float(read_recipe("--optimizer", optimizer, OPTIMIZERS).options["lr"])
    picked = read_recipe("--schedule", schedule, SCHEDULE_OPTIONS)
    return SCHEDULES[picked.name].rate(picked.options, lr, update - 1) / lr


def read_recipe(flag: str, text: str, known: Mapping[str, tuple[Option, ...]]) -> Picked:
    """The name in `text`, with all its options as values; raises `RequestError`."""
    asked = f"{flag} {text}"
    try:
        choice = parse_choice(text)
    except RequestError as error:
        raise RequestError(
            asked=asked,
            found=error.found,
            why=f"{flag} reads NAME, or NAME:option=value,…",
            do=f"for example {flag} {next(iter(known))}:{next(iter(known.values()))[0].name}=…",
        ) from None
    if choice.name not in known:
        raise RequestError(
            asked=asked,
            found=f"no {flag.lstrip('-')} of the name {choice.name!r}",
            why=f"it is one of {', '.join(known)}",
            do=nearest(choice.name, known),
        )
    values = read_all(choice.options, known[choice.name], asked, f"{choice.name!r}")
    return Picked(choice.name, values)


def check_recipe(optimizer: str, schedule: str) -> None:
    """Raise `RequestError` for what no optimizer and no schedule here can be."""
    if optimizer:
        _check_nesterov(optimizer, read_recipe("--optimizer", optimizer, OPTIMIZERS).options)
    if not schedule:
        return
    _check_course(schedule, read_recipe("--schedule", schedule, SCHEDULE_OPTIONS).options)
    if not optimizer:
        raise RequestError(
            asked=f"--schedule {schedule}",
            found="no --optimizer",
            why="it says rates, and the rates of the task's own optimizer are its own",
            do="give --optimizer too, or write schedule(step) in the task",
        )


def _check_nesterov(optimizer: str, options: Mapping[str, Any]) -> None:
    if options.get("nesterov") and not options["momentum"]:
        raise RequestError(
            asked=f"--optimizer {optimizer}",
            found="nesterov=true, momentum=0",
            why="it looks ahead by the momentum, and there is none",
            do="give momentum, or leave nesterov out",
        )


def _check_course(schedule: str, options: Mapping[str, Any]) -> None:
    """The warm-up, if there is one, rises, and ends before the schedule does."""
    unit = "lowest_ratio" if "lowest_ratio" in options else "lowest"
    lowest, highest = options.get(unit, 0.0), options.get("highest", 1.0)
    if lowest > highest:
        raise RequestError(
            asked=f"--schedule {schedule}",
            found=f"{unit}={lowest}, over {highest}",
            why="a warm-up rises from the lowest rate to the highest",
            do=f"{unit}={highest} or less",
        )
    steps, total = options.get("steps", 0), options.get("total")
    if total is not None and total <= steps:
        raise RequestError(
            asked=f"--schedule {schedule}",
            found=f"total={total}, steps={steps}",
            why="total counts all updates, those of the warm-up (steps) too: none are left to fall",
            do="a larger total, or fewer steps",
        )
