"""Combinations, drawn at random: what a card offers, with a task and a way to run it.

A combination says only what differs from the plainest one: so what fails can be shrunk by leaving
out one thing after another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from drawn_task import MODELS, NORMS, OPTIMIZERS

from allranks.errors import RequestError
from allranks.strategies.card import Exact, Option
from allranks.strategies.choice import parse_choice
from allranks.strategies.resolve import card_for
from allranks.strategies.torch_cards import CARDS

STEPS = 6
RANKS = (1, 2, 3, 4)
CLOCKED = ("patience_s", "grace_s", "rejoins", "least")
"""Options that say how long something is waited for, and change no weight."""
NAMES = [n for n, c in CARDS.items() if "torch" in c.engines and isinstance(c.guarantee, Exact)]


FITS = {
    **dict.fromkeys(("gpipe", "1f1b", "interleaved", "zero-bubble", "model-parallel"), "layers"),
    **{"mesh": "layers", "context": "sentences", "expert": "mixture", "branches": "rare"},
}
"""Which models some strategies cut; they refuse most of the others."""


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
    dice = random.Random(f"{seed}/{number}")
    legs = [_leg(dice) for _ in range(1 if dice.random() < 0.7 else 2)]
    cut = [FITS[name] for leg in legs if (name := parse_choice(leg.strategy).name) in FITS]
    kind = dice.choice(cut if cut and dice.random() < 0.8 else MODELS)
    maybe: dict[str, list[Any]] = {
        "width": [4, 6, 12, 24],
        "depth": [1, 3, 4],
        "norm": list(NORMS[1:]),
        "dropout": [0.1, 0.5],
        "by": list(OPTIMIZERS),
        "samples": [9, 13, 37, 101],
        "batch_size": [3, 5, 7, 16, 24],
        "shards": [2, 4, 12],
        "clip_norm": [0.05, 1.0],
        "frozen": [True],
        "penalty": [0.01],
        "warm_up": [4],
    }
    settings = {"kind": kind} if kind != "layers" else {}
    settings |= {name: dice.choice(of) for name, of in maybe.items() if dice.random() < 0.4}
    flags: dict[str, Any] = {}
    if dice.random() < 0.3:
        flags["micro_batch"] = dice.choice([1, 2, 3, 5])
    if dice.random() < 0.2:
        flags["seed"] = dice.randrange(1000)
    if dice.random() < 0.2:
        flags["prefetch"] = dice.choice([1, 4])
    return Combination(tuple(legs), settings, flags)


def _leg(dice: random.Random) -> Leg:
    """A strategy that promises what one process gives, with some of its options."""
    while True:
        name = dice.choice(NAMES)
        options = [o for o in CARDS[name].options if o.name not in CLOCKED and dice.random() < 0.4]
        said = ",".join(f"{option.name}={_value(option, dice)}" for option in options)
        leg = Leg(f"{name}:{said}" if said else name, dice.choice(RANKS))
        choice = parse_choice(leg.strategy)
        try:
            card = card_for(choice)
            if isinstance(card.guarantee_of(card.read_options(choice.options)), Exact):
                return leg
        except RequestError:
            continue


def _value(option: Option, dice: random.Random) -> str:
    """A value of an option, as it is written."""
    if option.choices:
        choice = dice.choice(list(option.choices))
        own = [o for o in option.own_options(choice) if dice.random() < 0.5]
        inner = ",".join(f"{o.name}={_value(o, dice)}" for o in own)
        return f"{choice}({inner})" if inner else choice
    if isinstance(option.default, bool):
        return dice.choice(["true", "false"])
    if isinstance(option.default, int):
        least = int(option.at_least or 0)
        return str(dice.randint(least, least + 3))
    if option.name == "bucket_mb":
        return dice.choice(["0.0001", "0.001", "1"])
    return option.shown_default


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
        less = [{k: v for k, v in choice.options.items() if k != name} for name in choice.options]
        legs = [replace(leg, strategy=str(replace(choice, options=options))) for options in less]
        legs += [replace(leg, ranks=ranks) for ranks in (1, 2) if ranks < leg.ranks]
        found += [replace(one, legs=(*one.legs[:at], new, *one.legs[at + 1 :])) for new in legs]
    return found
