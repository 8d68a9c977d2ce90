"""`same_on_ranks` finds planted faults of parallel code, and calls no correct twin different."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from allranks.testing import NotSame
from parallel_faults import CASES, STEPS

RIGHT_CAUSES = 15


@pytest.mark.slow(but=3, most=9)
@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found_with_its_cause(name: str, same_on_ranks: Any) -> None:
    step, tensor, kind, function = CASES[name]
    with pytest.raises(NotSame) as found:
        same_on_ranks(partial(function, wrong=True), ranks=(1, 2), steps=STEPS)
    assert (found.value.step, found.value.tensor, found.value.kind) == (step, tensor, kind)
    assert f"step {step}, tensor {tensor!r}" in str(found.value)


@pytest.mark.slow(but=3, most=10)
@pytest.mark.parametrize("precision", ["float64", "own"])
@pytest.mark.parametrize("name", CASES)
def test_a_correct_twin_is_the_same(name: str, precision: str, same_on_ranks: Any) -> None:
    step = partial(CASES[name].function, wrong=False)
    same_on_ranks(step, ranks=(1, 2, 3), steps=STEPS, precision=precision)


def test_there_are_twenty_and_most_causes_are_named() -> None:
    assert len(CASES) >= 20
    assert sum(bool(case.kind) for case in CASES.values()) >= RIGHT_CAUSES
