"""Combinations, drawn at random: what a card offers, with a task and a way to run it.

A combination says only what differs from the plainest one: so what fails can be shrunk by leaving
out one thing after another. Most of what is drawn can be: a refusal costs as much and shows less.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from drawn_task import MODELS, NORMS, OPTIMIZERS, ROW_BY_ROW
from shapes import LAYERED, NEEDS, OUTER, RATES, said_of, suits
from traits import WRAPPED, traits_of

from allranks.errors import RequestError
from allranks.strategies.card import Exact
from allranks.strategies.choice import parse_choice
from allranks.strategies.resolve import card_for, strategy_spec

STEPS = 6
TOGETHER = 4
"""So many numbers in a row draw one task: one process trains it once for all of them."""
TRAIT_RATE = 0.8
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
AS_LARGE_AS_GRADIENTS = ("sgd", "momentum", "nesterov")
"""Optimizers whose update is no larger than the gradient: others make steps of what rounds."""


@dataclass(frozen=True)
class Leg:
    """A part of the steps of a run: by this strategy, on so many ranks."""

    strategy: str = "ddp"
    ranks: int = 2


@dataclass(frozen=True)
class Combination:
    """A task as `settings`, flags of the command line, and one leg or two: the second resumes."""

    legs: tuple[Leg, ...] = (Leg(),)
    settings: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        legs = " then ".join(f"{leg.strategy} on {leg.ranks}" for leg in self.legs)
        said = {**self.settings, **{f"--{name}": value for name, value in self.flags.items()}}
        return " ".join([legs, *(f"{name}={value}" for name, value in said.items())])


def drawn(seed: int, number: int) -> Combination:
    """The combination of this number: the same for the same seed, whatever was drawn before."""
    settings, flags = _task(random.Random(f"{seed}/task/{number // TOGETHER}"))
    habit = random.Random(f"{seed}/trait/{number // TOGETHER}")
    if suits("trait", settings) and habit.random() < TRAIT_RATE:
        settings["trait"] = habit.choice(traits_of(settings))
    dice = random.Random(f"{seed}/{number}")
    bitwise = "bitwise" in flags
    count = 1 if dice.random() < 0.8 else 2
    legs = tuple(_leg(dice, settings, flags, bitwise) for _ in range(count))
    return Combination(legs, settings, flags | _more_flags(dice, settings))


def _task(dice: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one process is told, too: a task, the seed, and how the arithmetic is done."""
    kind = dice.choice(MODELS)
    maybe: dict[str, list[Any]] = {
        "width": [4, 6, 12, 24],
        "depth": [1, 3, 4, 7],
        "norm": list(NORMS[1:]),
        "dropout": [0.1, 0.5],
        "by": list(ROW_BY_ROW if kind == "lookups" else OPTIMIZERS),
        "samples": [9, 13, 37, 101],
        "batch_size": [3, 5, 7, 16, 24],
        "shards": [2, 4, 12],
        "clip_norm": [0.05, 1.0],
        "frozen": [True],
        "penalty": [0.01],
        "weighted": [True],
        "warm_up": [4],
        "ema": [0.5, 0.99],
        "last_batch": ["drop"],
        "batchnorm": ["whole"],
    }
    settings = {"kind": kind} if kind != "layers" else {}
    often = ("by", "norm")
    settings |= {
        name: dice.choice(of)
        for name, of in maybe.items()
        if dice.random() < (0.6 if name in often else 0.3)
    }
    for name in (name for name in list(settings) if not suits(name, settings)):
        del settings[name]
    flags: dict[str, Any] = {}
    if dice.random() < 0.2:
        flags["seed"] = dice.randrange(1000)
    # torch has no LSTM in fp16 on a CPU
    known = PRECISIONS[:-1] if kind == "recurrent" else PRECISIONS
    if dice.random() < 0.2 and settings.get("batchnorm") != "whole":
        flags |= {"bitwise": True, "precision": dice.choice(known)}
    elif dice.random() < 0.3 and settings.get("by", "sgd") in AS_LARGE_AS_GRADIENTS:
        flags["precision"] = dice.choice(["fp32", "bf16"])  # fp16 skips other steps, as it is cut
    return settings, flags


def _more_flags(dice: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """What only the combination is told, since it changes no sum but by rounding."""
    kind, flags = settings.get("kind", "layers"), dict[str, Any]()
    norms = settings.get("norm") == "batch" or kind == "mixture"
    if dice.random() < (0.05 if norms else 0.25):
        flags["micro_batch"] = dice.choice([1, 2, 3, 5])
    maybe: dict[str, list[Any]] = {
        "prefetch": [1, 4],
        "verify_every": [2],
        "witness": ["stop"],
        "activation_checkpointing": [True] * (kind in ("sentences", "residual") and not norms),
        "channels_last": [True] * (kind in ("images", "residual")),
        "backend": ["gloo"],
    }
    return flags | {n: dice.choice(of) for n, of in maybe.items() if of and dice.random() < 0.08}


def _leg(
    dice: random.Random, settings: dict[str, Any], flags: dict[str, Any], bitwise: bool
) -> Leg:
    """A strategy that promises what one process gives, with some of its options."""
    rates = {name: rate for name, rate in RATES.items() if _can_be(name, settings, bitwise)}
    while True:
        name = dice.choices(list(rates), list(rates.values()))[0]
        leg = said_of(name, settings, bitwise, dice)
        if leg is None:
            continue
        strategy, ranks = leg
        choice = parse_choice(strategy)
        try:
            card = card_for(choice)
            if isinstance(card.guarantee, Exact):
                options = card.read_options(choice.options)
                if not isinstance(card.guarantee_of(options), Exact):
                    continue
            if dice.random() < 0.98:  # now and then one that is refused by its mesh alone
                spec = strategy_spec(strategy, ranks)
                if spec.parts_of_a_batch > settings.get("shards", 8) or spec.mesh.ranks != ranks:
                    continue
            return Leg(strategy, ranks)
        except RequestError:
            continue


def _can_be(name: str, settings: dict[str, Any], bitwise: bool) -> bool:
    """Whether a strategy has something to do with such a model."""
    kind = settings.get("kind", "layers")
    if bitwise and card_for(parse_choice(name)).bitwise_options is None:
        return False
    wrapped = settings.get("trait") in WRAPPED
    if name in LAYERED and (wrapped or settings.get("batchnorm") == "whole"):
        return False
    if name in OUTER and settings.get("trait") == "step_hook":
        return False  # the mean of weights that were shortened is not the mean, shortened
    return name not in NEEDS or kind in NEEDS[name]


def simpler(one: Combination) -> list[Combination]:
    """What is left of a combination without one thing; the largest cuts first."""
    found = [replace(one, legs=(leg,)) for leg in one.legs if len(one.legs) > 1]
    for name in one.settings:
        rest = {key: value for key, value in one.settings.items() if key != name}
        found.append(replace(one, settings=rest))
    for name in one.flags:
        rest = {key: value for key, value in one.flags.items() if key != name}
        found.append(replace(one, flags=rest))
    for at, leg in enumerate(one.legs):
        choice = parse_choice(leg.strategy)
        can_go = [name for name in choice.options if f"{name}=" not in OUTER.get(choice.name, "")]
        less = [{k: v for k, v in choice.options.items() if k != name} for name in can_go]
        legs = [replace(leg, strategy=str(replace(choice, options=options))) for options in less]
        legs += [replace(leg, ranks=ranks) for ranks in (1, 2) if ranks < leg.ranks]
        found += [replace(one, legs=(*one.legs[:at], new, *one.legs[at + 1 :])) for new in legs]
    return found
