"""Batches that are handed out ahead: in order, each once, bounded,
and held back where they must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.tensorflow.parameter_server.in_flight import Ahead

pytestmark = pytest.mark.slow


@given(
    items=st.integers(0, 40),
    most=st.integers(1, 7),
    every=st.integers(1, 9),
    over_at=st.integers(0, 40),
)
def test_what_is_under_way(items: int, most: int, every: int, over_at: int) -> None:
    """Nothing is under way behind every `every`-th item; after `over_at` nothing is begun."""
    begun: list[int] = []
    done: list[int] = []

    def schedule(item: int) -> str:
        assert len(begun) - len(done) < most, "never more than that at once"
        assert all(other // every == item // every for other in begun[len(done) :])
        begun.append(item)
        return f"result {item}"

    ahead = Ahead[int, str](most, schedule, lambda last, item: item % every == 0)
    for item in ahead.through(iter(range(items)), lambda: len(done) >= over_at):
        assert item == len(done) and item in begun
        assert ahead.pop_oldest() == (item, f"result {item}")
        done.append(item)
    assert done == begun == list(range(len(done))) and len(ahead) == 0
    assert len(done) == items or len(done) >= over_at


def test_it_is_as_far_ahead_as_it_may_be() -> None:
    begun: list[int] = []
    ahead = Ahead[int, None](3, begun.append, lambda last, item: False)
    through = ahead.through(iter(range(10)), lambda: False)
    assert next(through) == 0 and begun == [0, 1, 2]
    ahead.pop_oldest()
    assert next(through) == 1 and begun == [0, 1, 2, 3]
    through.close()  # type: ignore[attr-defined]
