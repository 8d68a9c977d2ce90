"""The best value of a metric so far, and for how long it has not been bettered. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """`rule` is "max:METRIC" or "min:METRIC"; `in_vain` counts values in a row that are no better.

    A value that is not there, or not a number, is never better.
    """

    rule: str
    value: float | None = None
    in_vain: int = 0

    @property
    def metric(self) -> str:
        return self.rule.partition(":")[2]

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Take in the next evaluation; returns whether it is the best so far."""
        value = metrics.get(self.metric, math.nan)
        sign = -1 if self.rule.startswith("min:") else 1
        better = not math.isnan(value) and (self.value is None or sign * value > sign * self.value)
        self.in_vain = 0 if better else self.in_vain + 1
        if better:
            self.value = value
        return better

    def state(self) -> dict[str, Any]:
        """What later decisions depend on, as plain values."""
        return {"rule": self.rule, "value": self.value, "in_vain": self.in_vain}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned, if it is of the same rule."""
        if state["rule"] == self.rule:
            self.value, self.in_vain = state["value"], int(state["in_vain"])
