"""The best value so far."""

from __future__ import annotations

import pytest

from allranks.training.engine.trainer import Best


@pytest.mark.parametrize(
    ("rule", "values", "better", "in_vain"),
    [
        ("max:a", [0.1, 0.3, 0.3, 0.2], [True, True, False, False], 2),
        ("min:a", [0.3, 0.1, 0.2, 0.05], [True, True, False, True], 0),
        ("min:a", [float("nan"), 1.0, float("nan")], [False, True, False], 1),
    ],
)
def test_values_one_after_the_other(
    rule: str, values: list[float], better: list[bool], in_vain: int
) -> None:
    best = Best(rule)
    assert [best.take({"a": value, "b": 9.0}) for value in values] == better
    assert best.in_vain == in_vain
    again = Best(rule)
    again.load_state(best.state())
    assert again == best


def test_the_state_of_another_rule_is_passed_over() -> None:
    best = Best("max:a")
    best.load_state({"rule": "min:loss", "value": 0.1, "in_vain": 7})
    assert best == Best("max:a")
