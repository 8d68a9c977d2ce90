"""`allranks strategies [NAME]`: the cards, by family; one of them whole."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.options import Verb
from allranks.strategies.card import Approximate, Card, Guarantee, Option
from allranks.strategies.cards import CARDS, SYMBOLS
from allranks.strategies.resolve import card_of


@click.command(cls=Verb)
@click.argument("name", required=False)
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def strategies(name: str | None, as_object: bool) -> None:
    """Show what each strategy promises, sends and stores; NAME shows one card whole."""
    cards = [card_of(name)] if name else list(CARDS.values())
    if as_object:
        data = [_as_data(card) for card in cards]
        click.echo(as_json(data[0] if name else data))
    elif name:
        click.echo(_whole(cards[0]))
    else:
        click.echo("\n".join(_list(cards)))


FAMILIES: dict[str, Callable[[Card], bool]] = {
    "TensorFlow": lambda card: "torch" not in card.engines,
    "Each rank at its own pace": lambda card: not card.agreement.lockstep,
    "Ranks train apart and meet": lambda card: isinstance(card.guarantee, Approximate),
    "A part of the model or the optimizer on each rank": lambda card: (
        card.agreement.weights != "replicated" or card.agreement.cuts_optimizer
    ),
    "The whole model on every rank": lambda card: card.many_ranks,
    "In one process": lambda card: True,
}
"""The family of a card is the first that holds; they are shown from the last to the first."""
WIDEST = 110
SUBJECT = 13


MEANINGS = """\
EXACT: equal to one process (`single`) up to the order of floating-point sums.
APPROXIMATE: another result than one process, but for the setting that the card names.
REFERENCE: another result, equal to a plain loop in one process that the card describes."""


def _list(cards: list[Card]) -> Iterator[str]:
    yield f"{MEANINGS}\n"
    family = {
        card.name: next(name for name, holds in FAMILIES.items() if holds(card)) for card in cards
    }
    width = max(len(card.name) for card in cards)
    for heading in reversed(FAMILIES):
        members = [card for card in cards if family[card.name] == heading]
        kind = Counter(_kind(card.guarantee) for card in members).most_common(1)[0][0]
        yield f"{heading}: {kind}"
        for card in members:
            yield from _wrapped(f"  {card.name:<{width}}  ", card.summary)
            yield from _wrapped(" " * (width + 4), f"Take it when {card.take_when}")
            if exceptions := _exceptions(card, kind):
                yield from _wrapped(" " * (width + 4), exceptions)
        yield ""
    yield "allranks strategies NAME shows one whole: what it sends and stores, and its options."


def _wrapped(subject: str, text: str) -> list[str]:
    """A paragraph behind its subject, as wide as the terminal."""
    columns = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    return textwrap.wrap(
        text,
        max(columns, len(subject) + 40),
        initial_indent=subject,
        subsequent_indent=" " * len(subject),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _guarantees(card: Card) -> dict[str, str]:
    """What its options make of the guarantee: `reduce=fp16 or reduce=bf16` -> the guarantee."""
    settings_of: dict[str, list[str]] = {}
    for option in card.options:
        for choice, guarantee in option.guarantees.items():
            settings_of.setdefault(str(guarantee), []).append(f"{option.name}={choice}")
    return {" or ".join(settings): guarantee for guarantee, settings in settings_of.items()}


def _kind(guarantee: Guarantee) -> str:
    return str(guarantee).partition(":")[0]


def _exceptions(card: Card, usual: str) -> str:
    """Where it promises another kind: `REFERENCE with reduce=fp16, reduce=bf16.`; else nothing."""
    settings: dict[str, list[str]] = {}
    for option in card.options:
        for choice, guarantee in option.guarantees.items():
            settings.setdefault(_kind(guarantee), []).append(f"{option.name}={choice}")
    kinds = [f"{_kind(card.guarantee)}."] if _kind(card.guarantee) != usual else []
    return " ".join(
        kinds + [f"{kind} with {', '.join(names)}." for kind, names in settings.items()]
    )


def _symbols(card: Card) -> list[tuple[str, str]]:
    """The symbols in the formulas of a card, which it does not define itself, and their meaning."""
    formulas = f"{card.bytes_formula}; {card.memory}; {card.stored.formula if card.stored else ''}"
    return [
        (symbol, meaning)
        for symbol, meaning in SYMBOLS.items()
        if re.search(rf"(?<![\w-]){symbol}s?\b", formulas)
        and not re.search(rf"(?<![\w-]){symbol}( =|:| has)|{symbol} positions", formulas)
    ]


def _written(option: Option) -> Callable[[str], str]:
    """A choice as it is written with its own options: `power-sgd(rank=2)`."""

    def written(choice: str) -> str:
        options = ",".join(f"{o.name}={o.shown_default}" for o in option.own_options(choice))
        return f"{choice}({options})" if options else choice

    return written


def _as_data(card: Card) -> dict[str, Any]:
    return {
        "name": card.name,
        "summary": card.summary,
        "take_it_when": card.take_when,
        "guarantee": str(card.guarantee),
        "bytes_per_step": card.bytes_formula,
        "memory": card.memory,
        "stored": card.stored and card.stored.formula,
        "bitwise": card.bitwise_options is not None,
        "many_ranks": card.many_ranks,
        "engines": list(card.engines),
        "options": {
            o.name: {
                "default": o.default,
                "choices": list(o.choices),
                "meaning": o.meaning,
                "guarantees": {choice: str(g) for choice, g in o.guarantees.items()},
            }
            for o in card.options
        },
        "paper": card.paper or None,
    }


def _whole(card: Card) -> str:
    return "\n".join([f"{card.name}: {card.summary}", *_fields(card)])


def _fields(card: Card) -> Iterator[str]:
    """What a card says, a paragraph for each thing that stands by itself."""
    yield from _field("take it", f"when {card.take_when}")
    yield from _field("engine", " or ".join(card.engines))
    yield from _field("guarantee", str(card.guarantee))
    for settings, guarantee in _guarantees(card).items():
        yield from _field("", f"with {settings}, {guarantee}")
    yield from _field("--bitwise", "no" if card.bitwise_options is None else "yes")
    yield from _field("sends", "bytes per rank and step:")
    for case in card.bytes_formula.split("; "):
        yield from _field("", case)
    for number, case in enumerate(card.memory.split("; ")):
        yield from _field("" if number else "stores", case)
    if card.stored is not None:
        yield from _field("", f"between two steps {card.stored.formula} bytes")
    for number, (symbol, meaning) in enumerate(_symbols(card)):
        yield from _field("" if number else "where", f"{symbol}: {meaning}")
    for option in card.options:
        yield from _field("option", f"{option.name}={option.shown_default}: {option.meaning}")
        if option.choices:
            yield from _field("", f"one of {', '.join(map(_written(option), option.choices))}")
    if card.paper:
        yield from _field("paper", card.paper)


def _field(name: str, text: str) -> list[str]:
    return _wrapped(f"  {name:<{SUBJECT - 2}}", text)
