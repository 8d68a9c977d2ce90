"""A card reads the options of its strategy: typed, checked, and the defaults for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.card import Approximate, Card, Exact, Option, Reference
from allranks.errors import RequestError

CARD = Card(
    name="made-up",
    summary="One option of each type.",
    guarantee=Exact(),
    bytes_sent=lambda work, options: 0,
    bytes_formula="0",
    memory="none",
    many_ranks=True,
    can_be_bitwise=False,
    options=(
        Option("reduce", "mean", "how", ("mean", "tree"), {"tree": Approximate("never")}),
        Option("every", 4, "steps between two exchanges"),
        Option("ratio", 0.5, "part that is sent"),
    ),
)


def test_options_are_typed_and_the_rest_are_defaults() -> None:
    assert CARD.read_options({}) == {"reduce": "mean", "every": 4, "ratio": 0.5}
    found = CARD.read_options({"reduce": "tree", "every": "16", "ratio": "1"})
    assert found == {"reduce": "tree", "every": 16, "ratio": 1.0}
    assert [type(value) for value in found.values()] == [str, int, float]


@pytest.mark.parametrize(
    ("name", "text", "do"),
    [
        ("reduce", "treee", "did you mean 'tree'? known: mean, tree"),
        ("every", "2.5", "for example every=4"),
        ("every", "0", "for example every=4"),
        ("every", "-1", "for example every=4"),
        ("ratio", "much", "for example ratio=0.5"),
        ("ratio", "0", "for example ratio=0.5"),
        ("ratio", "nan", "for example ratio=0.5"),
        ("ratio", "inf", "for example ratio=0.5"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, text: str, do: str) -> None:
    with pytest.raises(RequestError) as refused:
        CARD.read_options({name: text})
    assert refused.value.asked == f"--strategy made-up:{name}={text}"
    assert refused.value.found == f"{name}={text}"
    assert refused.value.do == do


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(RequestError) as refused:
        CARD.read_options({"evry": "4"})
    assert refused.value.do == "did you mean 'every'? known: every, ratio, reduce"


def test_an_option_may_change_what_is_promised() -> None:
    assert CARD.guarantee_of(CARD.read_options({"every": "2"})) == Exact()
    assert CARD.guarantee_of(CARD.read_options({"reduce": "tree"})) == Approximate("never")


@pytest.mark.parametrize(
    ("guarantee", "text"),
    [
        (Exact(), "EXACT: equal to `single` up to the order of sums"),
        (Approximate("every=1"), "APPROXIMATE: exact when every=1"),
        (Reference("a loop"), "REFERENCE: equal to a loop"),
    ],
)
def test_a_guarantee_says_which_it_is(guarantee: Any, text: str) -> None:
    assert str(guarantee) == text
