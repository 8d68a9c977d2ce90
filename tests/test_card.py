"""A card reads the options of its strategy: typed, checked, and the defaults for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.cli.strategies import _whole
from allranks.errors import RequestError
from allranks.strategies.card import Approximate, Card, Exact, Option, Picked, Reference

CARD = Card(
    name="made-up",
    summary="One option of each type.",
    take_when="a test needs a card.",
    guarantee=Exact(),
    bytes_sent=lambda work, options: 0,
    bytes_formula="0",
    memory="none",
    many_ranks=True,
    options=(
        Option("reduce", "mean", "how", ("mean", "tree"), {"tree": Approximate("never")}),
        Option("every", 4, "steps between two exchanges", at_least=1),
        Option("ratio", 0.5, "part that is sent", above=0),
        Option("staleness", 2, "steps that a worker may be behind", at_least=0),
        Option("overlap", True, "send while backward goes on"),
        Option(
            "with",
            "none",
            "what is sent",
            {
                "none": (),
                "power-sgd": (
                    Option("rank", 2, "columns", at_least=1),
                    Option("warm", True, "start from the last step"),
                ),
                "outer": (
                    Option("then", "none", "what comes after", {"none": (), "nesterov": ()}),
                ),
            },
        ),
    ),
)


def test_options_are_typed_and_the_rest_are_defaults() -> None:
    rest = {"staleness": 2, "overlap": True, "with": Picked("none")}
    assert CARD.read_options({}) == {"reduce": "mean", "every": 4, "ratio": 0.5, **rest}
    found = CARD.read_options({"reduce": "tree", "every": "16", "ratio": "1"})
    assert found == {"reduce": "tree", "every": 16, "ratio": 1.0, **rest}
    assert [type(value) for value in found.values()][:3] == [str, int, float]


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("yes", True), ("1", True), ("false", False), ("No", False), ("0", False)],
)
def test_truth_is_read_as_in_the_fields_of_a_task(text: str, value: bool) -> None:
    assert CARD.read_options({"overlap": text})["overlap"] is value


def test_a_number_may_be_zero_where_its_bound_allows_it() -> None:
    assert CARD.read_options({"staleness": "0"})["staleness"] == 0


def test_a_choice_has_options_of_its_own() -> None:
    found = CARD.read_options({"with": "power-sgd(rank=4)"})["with"]
    assert (str(found), found.options) == ("power-sgd", {"rank": 4, "warm": True})
    assert CARD.read_options({"with": "power-sgd"})["with"].options == {"rank": 2, "warm": True}
    nested = CARD.read_options({"with": "outer(then=nesterov)"})["with"]
    assert nested.options == {"then": Picked("nesterov")}


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
        ("staleness", "-1", "for example staleness=2"),
        ("overlap", "ja", "for example overlap=true"),
        ("with", "power-sg(rank=4)", "did you mean 'power-sgd'? known: none, outer, power-sgd"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, text: str, do: str) -> None:
    with pytest.raises(RequestError) as refused:
        CARD.read_options({name: text})
    assert refused.value.asked == f"--strategy made-up:{name}={text}"
    assert refused.value.found == f"{name}={text}"
    assert refused.value.do == do


@pytest.mark.parametrize(
    ("name", "text", "found", "why", "do"),
    [
        ("with", "power-sgd(rank=0)", "rank=0", "rank is an int, at least 1: columns", "rank=2"),
        ("with", "power-sgd(rnk=4)", "option 'rnk'", "with=power-sgd has no such option", "'rank'"),
        ("reduce", "tree(x=1)", "option 'x'", "reduce=tree has no such option", "leave x out"),
    ],
)
def test_the_options_of_a_choice_are_checked_as_the_others(
    name: str, text: str, found: str, why: str, do: str
) -> None:
    with pytest.raises(RequestError) as refused:
        CARD.read_options({name: text})
    assert refused.value.asked == f"--strategy made-up:{name}={text}"
    assert (refused.value.found, refused.value.why) == (found, why)
    assert do in refused.value.do


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(RequestError) as refused:
        CARD.read_options({"evry": "4"})
    assert (
        refused.value.do
        == "did you mean 'every'? known: every, overlap, ratio, reduce, staleness, with"
    )


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


def test_a_card_shows_how_its_options_are_written() -> None:
    shown = _whole(CARD)
    assert "option     overlap=true: send while backward goes on\n" in shown
    choices = "one of none, power-sgd(rank=2,warm=true), outer(then=none)"
    assert f"option     with=none: what is sent\n{'':<13}{choices}" in shown
