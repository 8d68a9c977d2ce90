"""Optimizers and schedules that a job names in place of its task's, with their options. Pure.

`--optimizer adamw:lr=1e-3,weight_decay=0.01` updates all trained parameters in one group;
`--schedule warmup-lr:highest=1e-3,steps=1000` says its rate, in DeepSpeed's terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
STEPS = Option("steps", 1000, "updates until the highest rate", at_least=1)
KIND = Option("kind", "log", "how it rises", ("log", "linear"))
TOTAL = Option("total", 10_000, "updates until the end of the fall", at_least=1)
RATES = (
    Option("lowest", 0.0, "the rate of the first update", at_least=0),
    Option("highest", 1e-3, "the rate after the warm-up", above=0),
)
SCHEDULES: dict[str, tuple[Option, ...]] = {
    "warmup-lr": (*RATES, STEPS, KIND),
    "warmup-decay-lr": (*RATES, STEPS, KIND, TOTAL),
    "warmup-cosine-lr": (
        Option("lowest_ratio", 0.0, "the first part of the optimizer's rate", at_least=0),
        Option("end_ratio", 1e-4, "its last part", at_least=0),
        STEPS,
        KIND,
        TOTAL,
    ),
}


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
    _check_course(schedule, read_recipe("--schedule", schedule, SCHEDULES).options)
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
    """The warm-up rises, and ends before the schedule does."""
    unit = "lowest_ratio" if "lowest_ratio" in options else "lowest"
    lowest, highest = options[unit], options.get("highest", 1.0)
    if lowest > highest:
        raise RequestError(
            asked=f"--schedule {schedule}",
            found=f"{unit}={lowest}, over {highest}",
            why="a warm-up rises from the lowest rate to the highest",
            do=f"{unit}={highest} or less",
        )
    steps, total = options["steps"], options.get("total")
    if total is not None and total <= steps:
        raise RequestError(
            asked=f"--schedule {schedule}",
            found=f"total={total}, steps={steps}",
            why="total counts all updates, those of the warm-up (steps) too: none are left to fall",
            do="a larger total, or fewer steps",
        )
