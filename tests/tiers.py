"""Which tests are run when: two tiers, and products of which some cases stand for all.

    @pytest.mark.slow              a test, or a module, that `make test` leaves to `make test-full`
    @pytest.mark.slow(but=3)       so many of its cases, spread evenly, are run by `make test` too
    @pytest.mark.slow(most=8)      so many of its cases, spread evenly, are run with --tier: for
                                   cases that take seconds each. Without it, as for a mutant, or
                                   with --exhaustive all are

`--tier quick` and `--tier slow` have no test in common, and leave none out. Of a product

    @pytest.mark.thinned(2, ("strategy", EXACT), ("ranks", RANKS), ("task", TASKS))

is the whole under `--exhaustive`. Otherwise it is some of it, in which every two values of
different factors come together at least once (every value, where the first number is 1): a fault
that needs one rank count and one task shows, whatever the strategy. `where` says which cases there
are at all. The choice is the same every time, and gives all values of a factor about the same
share; with a `cost(*case)` it takes those that cost least, where they bring in as much. With an
`of(*case)` it is the values which that returns that come together, and every value of a factor
comes once: of a strategy and its options the strategy meets every task, each option one.

    @pytest.mark.cases("k", [1, 7], exhaustive=[2, 3, 4, 5, 6])

are the first, and under `--exhaustive` the others too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

Factor = tuple[str, Sequence[Any]]
MARKERS = (
    "thinned(together, *factors, where, cost, of): some cases of a product, "
    "and all of them under --exhaustive",
    "cases(names, values, exhaustive): parametrized by `values`, "
    "under --exhaustive by those of `exhaustive` too",
    "gpu: needs an accelerator, and is skipped without one",
    "slow(but, most): for `make test-full`, but for so many cases; "
    "and so many cases in both tiers, unless --exhaustive",
)
TIERS = ("quick", "slow")


def parametrize(metafunc: pytest.Metafunc, exhaustive: bool) -> None:
    """Give a test the cases that its markers ask for."""
    for mark in metafunc.definition.iter_markers("cases"):
        names, values = mark.args
        metafunc.parametrize(
            names, [*values, *(mark.kwargs.get("exhaustive", ()) if exhaustive else ())]
        )
    for mark in metafunc.definition.iter_markers("thinned"):
        together, *factors = mark.args
        found = product([values for _, values in factors], mark.kwargs.get("where"))
        if not exhaustive:
            found = thinned(found, together, mark.kwargs.get("cost"), mark.kwargs.get("of"))
        names = [name for names, _ in factors for name in names.split(",")]
        metafunc.parametrize(names, [flat(case, factors) for case in found])


def slow_ones(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the second tier."""
    found: list[pytest.Item] = []
    for but, cases in by_test(items, "but", 0):
        kept = spread(cases, but)
        found += [case for case in cases if case not in kept]
    return found


def more_than_most(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those that no tier runs without --exhaustive: of each test the cases beyond its `most`."""
    found: list[pytest.Item] = []
    for most, cases in by_test(items, "most", len(items)):
        kept = spread(cases, most)
        found += [case for case in cases if case not in kept]
    return found


def by_test(
    items: Sequence[pytest.Item], option: str, default: int
) -> Iterator[tuple[int, list[pytest.Item]]]:
    """Of each slow test an option of its marker, and its cases in order of their names."""
    tests: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            tests.setdefault((test, mark.kwargs.get(option, default)), []).append(item)
    for (_, number), cases in tests.items():
        yield number, sorted(cases, key=lambda item: item.nodeid)


def spread(cases: list[pytest.Item], number: int) -> list[pytest.Item]:
    """So many of the cases, evenly."""
    if number >= len(cases):
        return cases
    return [cases[len(cases) * (2 * n + 1) // (2 * number)] for n in range(number)]


def product(
    levels: Sequence[Sequence[Any]], where: Callable[..., bool] | None = None
) -> list[tuple[Any, ...]]:
    """Every case there is: one value of each factor."""
    return [case for case in itertools.product(*levels) if where is None or where(*case)]


def thinned(
    cases: list[tuple[Any, ...]],
    together: int,
    cost: Callable[..., float] | None = None,
    of: Callable[..., tuple[Any, ...]] | None = None,
) -> list[tuple[Any, ...]]:
    """Some of the cases, in which any `together` values that come together in one still do.

    One by one the case with the most of what is missing; of equal ones the cheapest, and of these
    that with the rarest values.
    """
    ahead = [
        (
            case,
            parts_of(of(*case), together) | parts_of(case, 1) if of else parts_of(case, together),
            parts_of(case, 1),
            0.0 if cost is None else cost(*case),
        )
        for case in cases
    ]
    missing = {part for _, parts, _, _ in ahead for part in parts}
    chosen: list[tuple[Any, ...]] = []
    uses: Counter[Any] = Counter()
    while missing:
        case, parts, values, _ = max(
            ahead,
            key=lambda one: (
                len(one[1] & missing),
                -one[3],
                -sum(uses[value] for value in one[2]),
            ),
        )
        chosen.append(case)
        uses.update(values)
        missing -= parts
    return chosen


def parts_of(case: tuple[Any, ...], together: int) -> set[tuple[tuple[int, str], ...]]:
    """The values of so many factors at a time, each with the number of its factor."""
    values = [(number, repr(value)) for number, value in enumerate(case)]
    return set(itertools.combinations(values, together))


def flat(case: tuple[Any, ...], factors: Sequence[Factor]) -> tuple[Any, ...]:
    """The values for the arguments of a test: a factor of several names has a tuple of each."""
    values: list[Any] = []
    for value, (names, _) in zip(case, factors, strict=True):
        values += value if "," in names else [value]
    return tuple(values)
