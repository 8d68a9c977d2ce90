"""The little language of `--strategy`: what is written is what is read, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.strategies.choice import Choice, parse_choice

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
PLAIN = st.from_regex(r"[A-Za-z0-9./:=+_-]{1,8}", fullmatch=True)


def nested(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A value that is a choice again, in brackets."""
    options = st.dictionaries(NAMES, values, min_size=1, max_size=3)
    return st.builds(
        lambda name, given: f"{name}({','.join(f'{k}={v}' for k, v in given.items())})",
        NAMES,
        options,
    )


CHOICES = st.builds(
    Choice, NAMES, st.dictionaries(NAMES, st.recursive(PLAIN, nested, max_leaves=5), max_size=4)
)


@pytest.mark.slow
@given(choice=CHOICES)
def test_what_is_written_is_read_again(choice: Choice) -> None:
    assert parse_choice(str(choice)) == choice


@pytest.mark.slow
@given(choice=CHOICES.filter(lambda choice: bool(choice.options)))
def test_brackets_mean_the_same_as_a_colon(choice: Choice) -> None:
    options = ",".join(f"{key}={value}" for key, value in choice.options.items())
    assert parse_choice(f"{choice.name}({options})") == choice


def test_a_value_in_brackets_is_a_choice_again() -> None:
    outer = parse_choice("local-sgd:every=16,outer=diloco(lr=0.7,with=power-sgd(rank=4))")
    assert outer.name == "local-sgd"
    assert outer.options == {"every": "16", "outer": "diloco(lr=0.7,with=power-sgd(rank=4))"}
    inner = parse_choice(outer.options["outer"])
    assert inner == Choice("diloco", {"lr": "0.7", "with": "power-sgd(rank=4)"})
    assert parse_choice(inner.options["with"]) == Choice("power-sgd", {"rank": "4"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "'' is not a name"),
        (":a=1", "'' is not a name"),
        ("d dp", "'d dp' is not a name"),
        ("ddp:", "'' is not key=value"),
        ("ddp()", "'' is not key=value"),
        ("ddp:a", "'a' is not key=value"),
        ("ddp:a=", "'a=' is not key=value"),
        ("ddp:=1", "'=1' is not key=value"),
        ("ddp:a=1,", "'' is not key=value"),
        ("ddp:a=1,,b=2", "'' is not key=value"),
        ("ddp:a=1,a=2", "option 'a' is given twice"),
        ("ddp(a=1", "a bracket is not closed at the end"),
        ("ddp(a=1)x", "a bracket is not closed at the end"),
        ("ddp:a=b(c=1", "a bracket is not closed"),
        ("ddp:a=b)", "a bracket closes that was never opened"),
        ("ddp:a=)(", "a bracket closes that was never opened"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_choice(text)
    assert refused.value.found == found
    assert refused.value.asked == f"--strategy {text}"


@given(text=st.text(max_size=20))
def test_any_text_is_a_choice_or_a_bad_request(text: str) -> None:
    try:
        choice = parse_choice(text)
    except RequestError:
        return
    assert parse_choice(str(choice)) == choice
