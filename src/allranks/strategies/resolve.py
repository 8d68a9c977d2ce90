"""From the name of a strategy to what it is: its card, its processes, its options checked."""

from __future__ import annotations

from allranks.errors import RequestError, nearest
from allranks.strategies.card import Card
from allranks.strategies.choice import Choice, parse_choice
from allranks.strategies.mesh import Mesh
from allranks.strategies.roles import Crew, trainers
from allranks.strategies.torch_cards import CARDS

TO_COME = {
    **dict.fromkeys(("zero1", "zero2", "zero3", "fsdp", "fsdp2", "hsdp"), "sharded training"),
    **dict.fromkeys(("tensor", "tensor-parallel", "tp"), "tensor parallelism"),
    **dict.fromkeys(("pipeline", "pp", "gpipe", "model-parallel"), "splitting a model by layers"),
    **dict.fromkeys(("context", "ulysses", "ring"), "splitting sequences"),
    **dict.fromkeys(("expert", "moe"), "splitting experts"),
    **dict.fromkeys(("local-sgd", "diloco", "slowmo", "bmuf"), "training with rare exchanges"),
    **dict.fromkeys(("ps", "async"), "a parameter server for torch"),
    "deepspeed": "DeepSpeed as a strategy",
}
"""Names that people know, of what is planned -> what they stand for."""


def card_for(choice: Choice) -> Card:
    """The card of a chosen strategy; an unknown name raises with the nearest known one."""
    if choice.name in TO_COME:
        raise RequestError(
            asked=f"--strategy {choice}",
            found=f"{choice.name!r}, which this version does not have yet",
            why=f"{TO_COME[choice.name]} is to come, and nothing here does the same",
            do=f"one of those there are: {', '.join(CARDS)}",
        )
    if choice.name not in CARDS:
        raise RequestError(
            asked=f"--strategy {choice}",
            found=f"no strategy {choice.name!r}",
            why="a strategy is asked for by the name on its card",
            do=nearest(choice.name, CARDS),
        )
    return CARDS[choice.name]


def devices_of_a_rank(strategy: str) -> int:
    """How many devices one rank works on: the replicas of `dp`, one of every other strategy."""
    choice = parse_choice(strategy)
    return int(card_for(choice).read_options(choice.options).get("replicas", 1))


def mesh_of(strategy: str, ranks: int) -> Mesh:
    """How so many ranks lie along the axes of a strategy; raises `RequestError` if they do not fit."""
    choice = parse_choice(strategy)
    card = card_for(choice)
    return card.mesh(ranks, card.read_options(choice.options))


def crew_of(strategy: str, ranks: int) -> Crew:
    """The processes of a job of so many ranks: trainers, or the roles that its strategy has."""
    if not strategy:
        return Crew(trainers(ranks))
    choice = parse_choice(strategy)
    card = card_for(choice)
    return Crew(card.roles(ranks, card.read_options(choice.options)))


def _for_many(card: Card) -> str:
    """A strategy of the same engine in which many ranks work together."""
    return "multi-worker-mirrored" if card.engines == ("tensorflow",) else "ddp"


def resolved_strategy(text: str, *, ranks: int, bitwise: bool) -> Choice:
    """The choice with its options checked; under `bitwise` with those that it needs, or refused."""
    choice = parse_choice(text)
    card = card_for(choice)
    card.read_options(choice.options)
    if ranks > 1 and not card.many_ranks:
        raise RequestError(
            asked=f"--strategy {text} --ranks {ranks}",
            found=f"{card.name!r} is one process",
            why="there would be nothing for the other ranks to do",
            do=f"--ranks 1, or --strategy {_for_many(card)} for {ranks} ranks",
        )
    return _with_equal_bits(card, choice, f"--strategy {text} --bitwise") if bitwise else choice


def _with_equal_bits(card: Card, choice: Choice, asked: str) -> Choice:
    """The choice with the options that equal bits on any ranks need; raises `RequestError`."""
    if card.bitwise_options is None:
        able = [name for name, other in CARDS.items() if other.bitwise_options is not None]
        raise RequestError(
            asked=asked,
            found=f"{card.name!r} has no fixed order of sums",
            why="equal bits on any number of ranks need one tree over all shards",
            do="use " + " or ".join(able),
        )
    given, needed = card.read_options(choice.options), card.read_options(card.bitwise_options)
    for name, text in card.bitwise_options.items():
        if name in choice.options and given[name] != needed[name]:
            raise RequestError(
                asked=asked,
                found=f"{name}={choice.options[name]}",
                why=f"only the {text} adds in an order that does not follow the ranks",
                do=f"leave {name} out, or drop --bitwise",
            )
    return Choice(choice.name, {**choice.options, **card.bitwise_options})
