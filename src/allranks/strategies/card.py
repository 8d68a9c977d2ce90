"""The promise of a strategy, as data: its guarantee, its bytes, its memory, its options, its paper.

A card needs no framework to be read: it feeds `allranks strategies`, the checks on a request, the
documentation and the contract test, which holds every strategy to exactly what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from allranks.catalog import STRATEGIES
from allranks.errors import RequestError, nearest
from allranks.strategies.choice import TRUTH, Choice, parse_choice
from allranks.strategies.mesh import REPLICATED, Agreement, Mesh, replicated_mesh
from allranks.strategies.roles import Role, trainers
from allranks.strategies.shards import Shares

WHOLE = "whole, the same on every rank"
APART = "every rank its own"
EVEN_SHARES = "its ranks do not each compute the gradients of whole shards, which one sum then adds"


@dataclass(frozen=True)
class Exact:
    """Equal to `single` on the same global batches, up to the order of floating-point sums."""

    def __str__(self) -> str:
        return "EXACT: equal to `single` up to the order of sums"


@dataclass(frozen=True)
class Approximate:
    """Not equal in general; equal at the named setting, where the same machinery really runs.

    `exact_when` names it in words, `setting` in options of the strategy (those of a choice in their
    brackets), which stand for all but what says how ranks lie. With `plain_sgd` it is exact for
    SGD without momentum, and without clipping.
    """

    exact_when: str
    setting: Mapping[str, str] = field(default_factory=dict)
    plain_sgd: bool = False

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
    reducers that send gradients in another type; `shapes`, those of the gradients of each message,
    are for reducers that send matrices in another form. `passes` are the backward passes of the
    rank with the most, where each of them sends. `messages` that differ from step to step are the
    sums of `steps`. `shares` are those of the ranks, if they are not even.
    """

    messages: tuple[int, ...]
    ranks: int
    shards: int
    gradients: int = 0
    tally: int = 0
    passes: int = 1
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    steps: int = 1
    shares: Shares | None = None

    @property
    def dealt(self) -> Shares:
        """How many shards each rank owns."""
        return self.shares or Shares.even(self.shards, self.ranks)


@dataclass(frozen=True)
class Contents:
    """Bytes of all weights of a model, all trained, from which the memory of a rank follows.

    `cut` are those that a strategy distributes over ranks, by parts or one by one, and `uncut` all
    others (for a strategy that cuts nothing, either). `optimizer` is the bytes of its state for
    each byte of a weight: AdamW 2, SGD with momentum 1; a moving average is 1 more.
    """

    cut: int
    uncut: int
    optimizer: float
    ranks: int


@dataclass(frozen=True)
class Stored:
    """The bytes of a rank between two steps: weights, gradients or buckets, optimizer state.

    C, R and k of the `formula` are `cut`, `uncut` and `optimizer`; N are the ranks.
    """

    formula: str
    of: Callable[[Contents, Mapping[str, Any]], float]


@dataclass(frozen=True)
class Picked:
    """The value of an option whose choices have options of their own: `power-sgd(rank=4)`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Option:
    """An option of a strategy: its type is the type of its default.

    `choices` limits a text; as a mapping it gives each choice options of its own, written in
    brackets, and the value is a `Picked`. A number is `at_least` one bound, or `above` it, and
    `below` another, and always finite. `guarantees` are those of a choice that promises something
    else than the card.
    """

    name: str
    default: Any
    meaning: str
    choices: Mapping[str, tuple[Option, ...]] | tuple[str, ...] = ()
    guarantees: Mapping[str, Guarantee] = field(default_factory=dict)
    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def read(self, text: str, request: str) -> Any:
        """The typed value of `text`, or a `RequestError`."""
        if self.choices:
            return self._read_choice(text, request)
        kind = type(self.default)
        value: Any = None
        if kind is bool:
            value = TRUTH.get(text.lower())
        else:
            with suppress(ValueError):
                value = kind(text)
        if value is None or not self._is_within(value):
            raise RequestError(
                asked=request,
                found=f"{self.name}={text}",
                why=f"{self.name} is {self._wanted()}: {self.meaning}",
                do=f"for example {self.name}={self.shown_default}",
            )
        return value

    def own_options(self, choice: str) -> tuple[Option, ...]:
        """What can be said in the brackets behind one of the choices."""
        return self.choices.get(choice, ()) if isinstance(self.choices, Mapping) else ()

    @property
    def shown_default(self) -> str:
        """The default, as it is written."""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def start(self) -> Any:
        """The value where nothing is given."""
        if not isinstance(self.choices, Mapping):
            return self.default
        return Picked(self.default, read_all({}, self.own_options(self.default), "", self.default))

    def _read_choice(self, text: str, request: str) -> Any:
        try:
            choice = parse_choice(text)
        except RequestError:  # a text that is no name is none of the choices either
            choice = Choice(text)
        if choice.name not in self.choices:
            raise RequestError(
                asked=request,
                found=f"{self.name}={text}",
                why=f"{self.name} is one of {', '.join(self.choices)}",
                do=nearest(choice.name, self.choices),
            )
        choice_options = self.own_options(choice.name)
        values = read_all(choice.options, choice_options, request, f"{self.name}={choice.name}")
        return Picked(choice.name, values) if isinstance(self.choices, Mapping) else choice.name

    def _is_within(self, value: Any) -> bool:
        if isinstance(value, (bool, str)):
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _wanted(self) -> str:
        """`an int, at least 1`: what a value has to be."""
        words = {bool: "true or false", int: "an int", float: "a finite float"}
        kind = words.get(type(self.default), "a text")
        bounds = {"at least": self.at_least, "above": self.above, "below": self.below}
        limits = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
        return ", ".join([kind, *limits])


def read_all(
    texts: Mapping[str, str], options: tuple[Option, ...], request: str, whose: str
) -> dict[str, Any]:
    """The value of every option: checked from its text, or its default.

    `whose` and `request` are words for the error of an unknown option.
    """
    known = {option.name: option for option in options}
    values = {name: option.start for name, option in known.items()}
    for name, text in texts.items():
        if name not in known:
            raise RequestError(
                asked=request,
                found=f"option {name!r}",
                why=f"{whose} has no such option",
                do=nearest(name, known) if known else f"leave {name} out: it has no options",
            )
        values[name] = known[name].read(text, request)
    return values


def replicas_of(options: Mapping[str, Any]) -> int:
    """The devices of a rank where it has a replica of the model on each."""
    return int(options["replicas"])


def parts_of(options: Mapping[str, Any]) -> int:
    """The devices of a rank where it has a part of the model on each."""
    return int(options["parts"])


@dataclass(frozen=True)
class Card:
    """The promise of one strategy.

    `guarantee` is what it promises unless an option says otherwise: ask `guarantee_of`.
    `bytes_sent(workload, options)` is per step, for the rank that sends most.
    """

    name: str
    summary: str
    take_when: str
    """When to take it: by the memory of a rank, the link, and the shape of the model."""
    guarantee: Guarantee
    bytes_sent: Callable[[Workload, Mapping[str, Any]], int]
    bytes_formula: str
    memory: str
    many_ranks: bool
    options: tuple[Option, ...] = ()
    bitwise_options: Mapping[str, str] | None = None
    """What `--bitwise` sets of its options; `None`: it cannot give equal bits on any ranks."""
    stored: Stored | None = None
    """Bytes on the rank that stores most; `None` for engines of which nobody has counted them."""
    paper: str = ""
    agreement: Agreement = REPLICATED
    mesh: Callable[[int, Mapping[str, Any]], Mesh] = lambda ranks, _: replicated_mesh(ranks)
    """How so many ranks lie along its axes;
    raises `RequestError` for a number that does not fit."""
    roles: Callable[[int, Mapping[str, Any]], tuple[Role, ...]] = lambda ranks, _: trainers(ranks)
    """The processes of a job of so many ranks with these options, the leader first."""
    parts_of_a_batch: Callable[[int, Mapping[str, Any]], int] | None = None
    """Into how many parts the shards of a batch are dealt out; `None`: one for each data rank."""
    devices_of_a_rank: Callable[[Mapping[str, Any]], int] = lambda _: 1
    """How many devices one rank works on with these options."""
    on_a_device: Literal["replica", "part"] = "replica"
    """What of the model each of these devices has; its plural is the option that says how many."""
    even_shares: Callable[[Mapping[str, Any]], str] = lambda _: EVEN_SHARES
    """Why its ranks cannot have unequal shares of a batch with these options; "" if they can."""
    rounds_together: bool = False
    """Whether a sum that a rank rounds has other terms than one of a process that cuts its batches
    as ranks do, such as the rows of several ranks: below 32 bits that one is no measure."""

    @property
    def state(self) -> str:
        """The kind of state in a checkpoint: strategies with the same one can resume each other."""
        return WHOLE if self.agreement.is_one_training else APART

    @property
    def engines(self) -> tuple[str, ...]:
        """Which engines have it."""
        return tuple(engine for engine, strategies in STRATEGIES.items() if self.name in strategies)

    def guarantee_of(self, options: Mapping[str, Any]) -> Guarantee:
        """The guarantee of the strategy with these options, as `read_options` returns them."""
        chosen = [(option.guarantees, str(options[option.name])) for option in self.options]
        promises = [guarantees[value] for guarantees, value in chosen if value in guarantees]
        loops = [promise.simulation for promise in promises if isinstance(promise, Reference)]
        if len(loops) > 1:
            return Reference("; and ".join(loops))
        return promises[0] if promises else self.guarantee

    def read_options(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """The value of every option: checked from its text, or its default."""
        values = {option.name: option.start for option in self.options}
        for name, text in texts.items():
            request = f"--strategy {self.name}:{name}={text}"
            whose = f"strategy {self.name!r}"
            values[name] = read_all({name: text}, self.options, request, whose)[name]
        return values
