"""What a run of the tests leaves out for time, and `--full` does not: choosing from products.

    @pytest.mark.thinned(2, ("strategy", EXACT), ("ranks", RANKS), ("task", TASKS))

is the whole product under `--full`. Otherwise it is some of it, in which every two values of
different factors come together at least once (every value, where the first number is 1): a fault
that needs one rank count and one task shows, whatever the strategy. `where` says which cases there
are at all. The choice is the same every time, and gives all values of a factor about the same share.

    @pytest.mark.cases("k", [1, 7], full=[2, 3, 4, 5, 6])

are the first, and under `--full` the others too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Factor = tuple[str, Sequence[Any]]
MARKERS = (
    "thinned(together, *factors, where): some cases of a product, and all of them under --full",
    "cases(names, values, full): parametrized by `values`, under --full by those of `full` too",
)


def parametrize(metafunc: pytest.Metafunc, full: bool) -> None:
    """Give a test the cases that its markers ask for."""
    for mark in metafunc.definition.iter_markers("cases"):
        names, values = mark.args
        metafunc.parametrize(names, [*values, *(mark.kwargs["full"] if full else ())])
    for mark in metafunc.definition.iter_markers("thinned"):
        together, *factors = mark.args
        found = product([values for _, values in factors], mark.kwargs.get("where"))
        found = found if full else thinned(found, together)
        names = [name for names, _ in factors for name in names.split(",")]
        metafunc.parametrize(names, [flat(case, factors) for case in found])


def product(
    levels: Sequence[Sequence[Any]], where: Callable[..., bool] | None = None
) -> list[tuple[Any, ...]]:
    """Every case there is: one value of each factor."""
    return [case for case in itertools.product(*levels) if where is None or where(*case)]


def thinned(cases: list[tuple[Any, ...]], together: int) -> list[tuple[Any, ...]]:
    """Some of the cases, in which any `together` values that come together in one still do.

    One by one the case with the most of what is missing; of equal ones that with the rarest values.
    """
    ahead = [(case, parts_of(case, together), parts_of(case, 1)) for case in cases]
    missing = {part for _, parts, _ in ahead for part in parts}
    chosen: list[tuple[Any, ...]] = []
    uses: Counter[Any] = Counter()
    while missing:
        case, parts, values = max(
            ahead, key=lambda one: (len(one[1] & missing), -sum(uses[value] for value in one[2]))
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
