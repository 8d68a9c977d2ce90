"""Resolves the text of a strategy to its card, its processes, and its checked options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from allranks.catalog import ENGINES
from allranks.errors import RequestError, nearest
from allranks.strategies.card import Card, Guarantee, Picked
from allranks.strategies.cards import CARDS
from allranks.strategies.cards.data_parallel import groups_of_nodes
from allranks.strategies.cards.learners import of_nodes
from allranks.strategies.choice import Choice, parse_choice
from allranks.strategies.mesh import DATA, Mesh
from allranks.strategies.roles import ProcessSet

TO_COME = {
    "deepspeed": "DeepSpeed as a strategy",
}
"""Names that people know, of what is planned -> what they stand for."""

CALLED_OTHERWISE = {
    **dict.fromkeys(("zero3", "fsdp2"), "fsdp"),
    **dict.fromkeys(("tensor-parallel", "tp"), "tensor"),
    **dict.fromkeys(("pipeline", "pp"), "1f1b"),
    **dict.fromkeys(("context-parallel", "cp", "ulysses", "sequence"), "context"),
    "ring": "context:attention=ring",
    **dict.fromkeys(("expert-parallel", "ep", "moe"), "expert"),
    **dict.fromkeys(("model-averaging", "post-local-sgd"), "local-sgd"),
    "bmuf": "block-momentum",
    **dict.fromkeys(("dist_sync", "dist_device_sync"), "ps"),
    **dict.fromkeys(("dist_async", "async"), "ps:mode=async"),
    **dict.fromkeys(("local", "device", "kvstore-local", "kvstore-device"), "dp"),
    **dict.fromkeys(("delta-push", "multiverso"), "ps:mode=delta"),
    "streaming-diloco": "diloco:fragments=4,overlap=1,mix=0.5",
}
"""Names that people know -> those of the same here."""

LAYOUT = ("learners", "inner", "bucket_mb", "shard", "data", "tensor")
"""Options that say how ranks lie and what they send at once, whatever is exact or not."""


def card_for(choice: Choice) -> Card:
    """The card of a chosen strategy; an unknown name raises with the nearest known one."""
    if choice.name in CARDS:
        return CARDS[choice.name]
    if choice.name in TO_COME:
        raise RequestError(
            asked=f"--strategy {choice}",
            found=f"{choice.name!r}, which this version does not have yet",
            why=f"{TO_COME[choice.name]} is to come, and nothing here does the same",
            do=f"one of those there are: {', '.join(CARDS)}",
        )
    other = CALLED_OTHERWISE.get(choice.name)
    raise RequestError(
        asked=f"--strategy {choice}",
        found=f"no strategy {choice.name!r}",
        why="a strategy is asked for by the name on its card",
        do=nearest(choice.name, CARDS) if other is None else f"--strategy {other}",
    )


@dataclass(frozen=True)
class StrategySpec:
    """A strategy as a job asks for it: its card, its options with their values, its processes.

    `text` is how it is written, with what was resolved.
    """

    text: str
    ranks: int
    card: Card
    options: Mapping[str, Any]
    process_set: ProcessSet

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def mesh(self) -> Mesh:
        """How its ranks lie along its axes; raises `RequestError` where they do not fit."""
        return self.card.mesh(self.ranks, self.options)

    @property
    def parts_of_a_batch(self) -> int:
        """Into how many parts the shards of a batch are dealt out."""
        dealt = self.card.parts_of_a_batch
        return dealt(self.ranks, self.options) if dealt is not None else self.mesh.size(DATA)

    @property
    def guarantee(self) -> Guarantee:
        """What it promises with these options."""
        return self.card.guarantee_of(self.options)

    @property
    def devices_of_a_rank(self) -> int:
        """How many devices one rank works on: more than one where it is the only rank."""
        return self.card.devices_of_a_rank(self.options)

    @property
    def replicas(self) -> int:
        """How many of these devices have a whole model, and samples of their own."""
        return self.devices_of_a_rank if self.card.on_a_device == "replica" else 1

    @property
    def adds_shards(self) -> bool:
        """Whether its options ask for sums shard by shard, in the order of `--bitwise`."""
        needed = self.card.bitwise_options or {}
        values = self.card.read_options(needed)
        return bool(needed) and all(self.options[name] == values[name] for name in needed)

    def __str__(self) -> str:
        return self.text


def card_of(text: str) -> Card:
    """The card of the strategy that a text names, whatever its options."""
    return card_for(parse_choice(text))


def engines_of(text: str) -> tuple[str, ...]:
    """The engines that have the strategy; none for a name that no card has."""
    card = CARDS.get(parse_choice(text).name)
    return () if card is None else card.engines


def strategy_spec(text: str, ranks: int) -> StrategySpec:
    """The strategy that a text describes, for so many ranks; raises `RequestError`."""
    return _spec(text, parse_choice(text), ranks)


def at_setting(text: str, setting: Mapping[str, str]) -> str:
    """The strategy with the options of a setting, and of its own those that lay its ranks out."""
    choice = parse_choice(text)
    layout = {name: value for name, value in choice.options.items() if name in LAYOUT}
    return str(Choice(choice.name, {**layout, **setting}))


def fitted(text: str, ranks: int) -> str:
    """The strategy of an elastic job, for a group of so many ranks.

    Under `hsdp` the smallest number of ranks hold a model that divides `ranks`, and is not below
    `shard`, so that none has a larger part; with fewer ranks than that all hold one.
    """
    choice = parse_choice(text)
    if choice.name != "hsdp":
        return text
    shard = int(card_for(choice).read_options(choice.options)["shard"])
    if ranks == 1:
        return str(Choice("fsdp", {n: v for n, v in choice.options.items() if n != "shard"}))
    fits = next(size for size in range(min(shard, ranks), ranks + 1) if ranks % size == 0)
    return str(Choice(choice.name, {**choice.options, "shard": str(fits)}))


def has_mesh(text: str, ranks: int) -> bool:
    """Whether so many ranks fit on the axes of the strategy that a text describes."""
    try:
        return strategy_spec(text, ranks).mesh.ranks == ranks
    except RequestError:
        return False


def _spec(text: str, choice: Choice, ranks: int) -> StrategySpec:
    card = card_for(choice)
    options = MappingProxyType(card.read_options(choice.options))
    return StrategySpec(text, ranks, card, options, ProcessSet(card.roles(ranks, options)))


def resolved_strategy(
    text: str, *, ranks: int, bitwise: bool, per_node: int | None = None
) -> StrategySpec:
    """The strategy, if it takes so many ranks; under `bitwise` with the options for that.

    `per_node` is how many ranks each node has (0: unlike numbers), where that is known.
    """
    choice = parse_choice(text)
    spec = _spec(str(choice), choice, ranks)
    if ranks > 1 and not spec.card.many_ranks:
        many = ENGINES[spec.card.engines[0]].many
        raise RequestError(
            asked=f"--strategy {text} --ranks {ranks}",
            found=f"{spec.name!r} is one process",
            why="there would be nothing for the other ranks to do",
            do=f"--ranks 1, or --strategy {many} for {ranks} ranks",
        )
    reduce = spec.options.get("reduce")
    if per_node is not None and isinstance(reduce, Picked):
        more = groups_of_nodes(reduce, per_node, ranks)
        choice = Choice(choice.name, {**choice.options, **more})
        spec = _spec(str(choice), choice, ranks)
    has_learners = "learners" in spec.options
    if per_node is not None and has_learners and (more := of_nodes(spec.options, per_node, ranks)):
        choice = Choice(choice.name, {**choice.options, **more})
        spec = _spec(str(choice), choice, ranks)
    if not bitwise:
        return spec
    choice = _with_equal_bits(spec.card, choice, f"--strategy {text} --bitwise")
    return _spec(str(choice), choice, ranks)


def _with_equal_bits(card: Card, choice: Choice, request: str) -> Choice:
    """The choice with the options that equal bits on any ranks need; raises `RequestError`."""
    if card.bitwise_options is None:
        able = [name for name, other in CARDS.items() if other.bitwise_options is not None]
        raise RequestError(
            asked=request,
            found=f"{card.name!r} has no fixed order of sums",
            why="equal bits on any number of ranks need one tree over all shards",
            do="use " + " or ".join(able),
        )
    options, needed = card.read_options(choice.options), card.read_options(card.bitwise_options)
    for name, text in card.bitwise_options.items():
        if name in choice.options and options[name] != needed[name]:
            raise RequestError(
                asked=request,
                found=f"{name}={choice.options[name]}",
                why=f"only the {text} adds in an order that does not follow the ranks",
                do=f"leave {name} out, or drop --bitwise",
            )
    return Choice(choice.name, {**choice.options, **card.bitwise_options})
