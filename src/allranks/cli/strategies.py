"""`allranks strategies [NAME]`: the cards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.strategies.card import Card, Option
from allranks.strategies.resolve import card_of
from allranks.strategies.torch_cards import CARDS


@click.command()
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
        width = max(len(card.name) for card in cards)
        for card in cards:
            promise = f"{card.guarantee}{_otherwise(card)}"
            click.echo(f"{card.name:<{width}}  {card.summary}\n{'':<{width}}  {promise}")


def _guarantees(card: Card) -> dict[str, str]:
    """What its options make of the guarantee: `reduce=fp16 or reduce=bf16` -> the guarantee."""
    found: dict[str, list[str]] = {}
    for option in card.options:
        for choice, guarantee in option.guarantees.items():
            found.setdefault(str(guarantee), []).append(f"{option.name}={choice}")
    return {" or ".join(settings): guarantee for guarantee, settings in found.items()}


def _otherwise(card: Card) -> str:
    """In a few words: ` (reduce=fp16 or reduce=bf16: REFERENCE)`."""
    kinds = [f"{what}: {text.partition(':')[0]}" for what, text in _guarantees(card).items()]
    return f" ({'; '.join(kinds)})" if kinds else ""


def _written(option: Option) -> Callable[[str], str]:
    """A choice as it is written with its own options: `power-sgd(rank=2)`."""

    def written(choice: str) -> str:
        own = ",".join(f"{o.name}={o.shown_default}" for o in option.own_options(choice))
        return f"{choice}({own})" if own else choice

    return written


def _as_data(card: Card) -> dict[str, Any]:
    return {
        "name": card.name,
        "summary": card.summary,
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
    lines = [
        f"{card.name}: {card.summary}",
        f"  engine     {' or '.join(card.engines)}",
        f"  guarantee  {card.guarantee}",
        *(f"             with {what}, {text}" for what, text in _guarantees(card).items()),
        f"  --bitwise  {'no' if card.bitwise_options is None else 'yes'}",
        f"  sends      {card.bytes_formula} bytes per rank and step",
        f"  stores     {card.memory}",
    ]
    if card.stored is not None:
        lines.append(f"             between two steps {card.stored.formula} bytes")
    for option in card.options:
        choices = f" ({' or '.join(map(_written(option), option.choices))})"
        what = f"{option.name}={option.shown_default}: {option.meaning}"
        lines.append(f"  option     {what}{choices if option.choices else ''}")
    if card.paper:
        lines.append(f"  paper      {card.paper}")
    return "\n".join(lines)
