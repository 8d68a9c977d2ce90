"""What a strategy promises, as data: its guarantee, its bytes, its memory, its options, its paper.

A card needs no framework to be read: it feeds `allranks strategies`, the checks on a request, the
documentation and the contract test, which holds every strategy to exactly what is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import RequestError, nearest
from allranks.roles import Role, trainers

WHOLE = "whole, the same on every rank"
APART = "every rank its own"


@dataclass(frozen=True)
class Exact:
    """Equal to `single` on the same global batches, up to the order of floating-point sums."""

    def __str__(self) -> str:
        return "EXACT: equal to `single` up to the order of sums"


@dataclass(frozen=True)
class Approximate:
    """Not equal in general; equal at the named setting, where the same machinery really runs."""

    exact_when: str

    def __str__(self) -> str:
        return f"APPROXIMATE: exact when {self.exact_when}"


@dataclass(frozen=True)
class Reference:
    """Equal to a plain simulation of itself in one process, which this sentence describes."""

    simulation: str

    def __str__(self) -> str:
        return f"REFERENCE: equal to {self.simulation}"


Guarantee = Exact | Approximate | Reference


@dataclass(frozen=True)
class Workload:
    """What the bytes of a step depend on: `messages` are the sizes in bytes that are summed.

    The last message carries the tally: loss, weight, samples, which parameters were used, moments
    of BatchNorm. `gradients` (how many numbers) and `tally` (its bytes) tell the two apart, for
    reducers that send gradients in another type.
    """

    messages: tuple[int, ...]
    ranks: int
    shards: int
    gradients: int = 0
    tally: int = 0


@dataclass(frozen=True)
class Option:
    """An option of a strategy: its type is the type of its default; `choices` limits it.

    `guarantees` are those of a choice that promises something else than the card does.
    """

    name: str
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    guarantees: Mapping[str, Guarantee] = field(default_factory=dict)

    def read(self, text: str, asked: str) -> Any:
        """The typed value of `text`, or a `RequestError`."""
        if self.choices and text not in self.choices:
            raise RequestError(
                asked=asked,
                found=f"{self.name}={text}",
                why=f"{self.name} is one of {', '.join(self.choices)}",
                do=nearest(text, self.choices),
            )
        kind = type(self.default)
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or (kind in (int, float) and not 0 < value < float("inf")):
            raise RequestError(
                asked=asked,
                found=f"{self.name}={text}",
                why=f"{self.name} is a positive {kind.__name__}: {self.meaning}",
                do=f"for example {self.name}={self.default}",
            )
        return value


@dataclass(frozen=True)
class Card:
    """The promise of one strategy.

    `guarantee` is what it promises unless an option says otherwise: ask `guarantee_of`.
    `bytes_sent(workload, options)` is per step, for the rank that sends most.
    """

    name: str
    summary: str
    guarantee: Guarantee
    bytes_sent: Callable[[Workload, dict[str, Any]], int]
    bytes_formula: str
    memory: str
    many_ranks: bool
    can_be_bitwise: bool
    options: tuple[Option, ...] = ()
    paper: str = ""
    engines: tuple[str, ...] = ("torch",)
    """Which engines have it."""
    state: str = WHOLE
    """What a checkpoint of it holds: strategies with the same words here go on from each other's."""
    roles: Callable[[int, dict[str, Any]], tuple[Role, ...]] = lambda ranks, _: trainers(ranks)
    """The processes of a job of so many ranks with these options, the leader first."""

    def guarantee_of(self, options: dict[str, Any]) -> Guarantee:
        """What the strategy promises with these options, as `read_options` gives them."""
        found = (o.guarantees.get(str(options[o.name])) for o in self.options)
        return next((guarantee for guarantee in found if guarantee is not None), self.guarantee)

    def read_options(self, given: dict[str, str]) -> dict[str, Any]:
        """Every option with its value: what was given, checked, and the defaults for the rest."""
        known = {option.name: option for option in self.options}
        values = {name: option.default for name, option in known.items()}
        for name, text in given.items():
            asked = f"--strategy {self.name}:{name}={text}"
            if name not in known:
                raise RequestError(
                    asked=asked,
                    found=f"option {name!r}",
                    why=f"strategy {self.name!r} has no such option",
                    do=nearest(name, known),
                )
            values[name] = known[name].read(text, asked)
        return values
