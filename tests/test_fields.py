"""Fields of a task: the same words from the command line and from a file, and never a lossy one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.job.job import read_value, with_settings


@dataclass(kw_only=True)
class Fields:
    """One field of each type."""

    whole: int = 1
    real: float = 0.5
    text: str = "as it was"
    flag: bool = False
    maybe: float | None = 1.0
    older: Optional[int] = None  # noqa: UP045 - users write it so
    kept: Literal["keep", "drop"] = "keep"
    level: Literal[1, 2] = 1
    made: list[int] = field(default_factory=list)
    shared: ClassVar[int] = 0


@dataclass
class Incomplete:
    """Two fields without a default."""

    width: int
    depth: int
    lr: float = 0.1


def set_one(name: str, value: Any) -> Any:
    return getattr(with_settings(Fields, {name: value}, "to train it"), name)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_a_text_that_is_not_finite_is_refused_and_a_default_is_kept(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        set_one("real", text)
    assert refused.value.why == "real takes float"
    assert set_one("real", float("inf")) == float("inf")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("whole", "12", 12),
        ("whole", 12, 12),
        ("whole", "-3", -3),
        ("real", "3e-4", 3e-4),
        ("real", "2", 2.0),
        ("real", 2, 2.0),
        ("text", "12", "12"),
        ("text", "", ""),
        ("text", "a=b, \u2028 'c'", "a=b, \u2028 'c'"),
        ("flag", "true", True),
        ("flag", "No", False),
        ("flag", True, True),
        ("maybe", "none", None),
        ("maybe", "2.5", 2.5),
        ("older", "7", 7),
        ("older", "none", None),
        ("kept", "drop", "drop"),
        ("level", "2", 2),
    ],
)
def test_a_value_takes_the_type_of_its_field(name: str, value: Any, wanted: Any) -> None:
    found = set_one(name, value)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whole", "2.5"),
        ("whole", 2.0),
        ("whole", "1e3"),
        ("whole", True),
        ("whole", "none"),
        ("real", "fast"),
        ("real", True),
        ("real", 2**53 + 1),
        ("real", 10**400),
        ("text", 12),
        ("text", True),
        ("flag", "maybe"),
        ("flag", 2),
        ("flag", 0.0),
        ("older", "2.5"),
        ("kept", "kee"),
        ("level", "3"),
        ("made", "[1, 2]"),
        ("whole", [1]),
        ("whole", {"a": 1}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_that_would_lose_something_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        set_one(name, value)
    assert refused.value.asked == f"--set {name}={value}"


@given(value=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
def test_a_number_comes_back_from_its_text(value: float) -> None:
    found = read_value("real", repr(value), float)
    assert found == value


def test_none_is_said_in_one_way_whatever_the_other_type() -> None:
    """A text field that may be none: `none` is none, as for every other type."""
    assert read_value("name", "none", str | None) is None
    assert read_value("name", "other", str | None) == "other"


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(RequestError) as refused:
        set_one("wohle", 1)
    assert refused.value.found == "no field 'wohle' in Fields"
    assert refused.value.do.startswith("did you mean 'whole'? known: flag, kept")
    with pytest.raises(RequestError):
        set_one("shared", 1)


def test_fields_without_a_value_are_named_all_at_once() -> None:
    with pytest.raises(RequestError) as refused:
        with_settings(Incomplete, {"lr": "0.2"}, "to train it")
    assert refused.value.asked == "to train it"
    assert refused.value.found == "no value for width, depth"
    assert refused.value.do == "--set width=… --set depth=…"
    assert with_settings(Incomplete, {"width": "1", "depth": "2"}, "") == Incomplete(1, 2, 0.1)
