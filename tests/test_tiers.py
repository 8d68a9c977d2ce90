"""What is left out of a run of the tests: never a value, never a pair of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers import flat, more_than_most, parts_of, product, slow_ones, thinned

LEVELS = st.lists(st.integers(1, 5).map(range), min_size=2, max_size=4)


@given(LEVELS, st.sampled_from([1, 2]))
def test_whatever_comes_together_still_does(levels: list[range], together: int) -> None:
    cases = product(levels)
    chosen = thinned(cases, together)
    for factors in itertools.combinations(range(len(levels)), together):
        wanted = set(itertools.product(*(levels[factor] for factor in factors)))
        assert {tuple(case[factor] for factor in factors) for case in chosen} == wanted
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(cases)


def test_a_third_of_a_product_of_three_or_less() -> None:
    cases = product([range(6), range(5), range(5)])
    assert len(cases) == 150 and len(thinned(cases, 2)) < 50
    assert [second for _, second in thinned(product([range(5), range(2)]), 1)] == [0, 1, 0, 1, 0]


def test_what_cannot_be_is_not_asked_for() -> None:
    cases = product(["ab", [1, 2], [3, 4]], lambda name, one, two: name != "a" or one == 1)
    chosen = thinned(cases, 2)
    assert all(one == 1 for name, one, _ in chosen if name == "a")
    parts = set().union(*(parts_of(case, 2) for case in cases))
    assert set().union(*(parts_of(case, 2) for case in chosen)) == parts


def test_of_cases_that_bring_in_as_much_the_cheapest_are_taken() -> None:
    cases = product(["abcd", [1, 2, 8], "wxyz"])
    plain, cheap = thinned(cases, 2), thinned(cases, 2, lambda _, ranks, __: ranks)
    assert sum(ranks for _, ranks, _ in cheap) <= sum(ranks for _, ranks, _ in plain)
    parts = set().union(*(parts_of(case, 2) for case in cases))
    assert set().union(*(parts_of(case, 2) for case in cheap)) == parts


def test_what_stands_for_a_value_meets_all_and_the_value_itself_comes_once() -> None:
    cases = product([["ddp", "ddp:a", "ddp:b", "zero"], "wxyz"])
    chosen = thinned(cases, 2, of=lambda strategy, task: (strategy.partition(":")[0], task))
    met = {(strategy.partition(":")[0], task) for strategy, task in chosen}
    assert met == set(itertools.product(["ddp", "zero"], "wxyz")) and len(chosen) == 8
    assert {strategy for strategy, _ in chosen} == {strategy for strategy, _ in cases}


@pytest.mark.thinned(1, ("first,second", [(1, 2), (3, 4)]), ("third", "ab"))
def test_a_test_is_given_its_cases(first: int, second: int, third: str) -> None:
    assert (first, second) in [(1, 2), (3, 4)] and third in "ab"


def test_a_factor_may_have_several_names() -> None:
    assert flat(((1, 2), "a"), [("first,second", []), ("third", [])]) == (1, 2, "a")


@pytest.mark.cases("number", [1, 2], exhaustive=[3])
def test_the_others_come_under_exhaustive(number: int, exhaustive: bool) -> None:
    assert number in ([1, 2, 3] if exhaustive else [1, 2])


def test_so_many_cases_of_a_slow_test_are_quick_and_always_the_same() -> None:
    def item(name: str, mark: Any) -> Any:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda asked: mark)

    but_two = SimpleNamespace(kwargs={"but": 2})
    cases = [item(f"a.py::test[{n}]", but_two) for n in range(6)]
    others = [item("a.py::quick", None), item("a.py::slow", SimpleNamespace(kwargs={}))]
    for order in ([*cases, *others], [*others, *cases[::-1]]):
        left = [one.nodeid for one in order if id(one) not in {*map(id, slow_ones(order))}]
        assert sorted(left) == ["a.py::quick", "a.py::test[1]", "a.py::test[4]"]


def test_cases_beyond_the_most_are_left_to_exhaustive() -> None:
    def item(name: str, **options: int) -> Any:
        return SimpleNamespace(
            nodeid=name, get_closest_marker=lambda asked: SimpleNamespace(kwargs=options)
        )

    cases = [item(f"a.py::test[{n}]", but=1, most=3) for n in range(6)]
    others = [item(f"a.py::other[{n}]") for n in range(4)]
    left = {one.nodeid for one in more_than_most([*others, *cases])}
    assert left == {f"a.py::test[{n}]" for n in (0, 2, 4)}
    kept = [one for one in [*others, *cases] if one.nodeid not in left]
    quick = {one.nodeid for one in kept} - {one.nodeid for one in slow_ones(kept)}
    assert quick == {"a.py::test[3]"}
