"""The loss scale of fp16: how far small gradients are lifted, and when that changes. Pure.

The loss is multiplied by the scale before backward, and the gradient divided by it after the
exchange. Every rank holds the same sums then, so all see an overflow alike, skip that update, and
change the scale alike. Two rules are in use, and differ by one step:

    torch    grows after exactly `every` good steps (torch.amp.GradScaler)
    tf_cnn   grows after `every` + 1 of them (tf_cnn_benchmarks)

Both halve the scale at an overflow. Micikevicius et al. 2017, Mixed Precision Training,
arXiv 1710.03740.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Option, read_all
from allranks.strategies.choice import parse_choice

OPTIONS = (
    Option("initial", 65536.0, "the scale of the first step", above=0),
    Option("every", 2000, "good steps after which it grows", at_least=1),
    Option("rule", "torch", "whose rule says when it grows", ("torch", "tf_cnn")),
)
LEAST = 1.0
"""An overflow at this scale is none of the scale's making: the gradient is infinite by itself."""


@dataclass
class LossScale:
    """The scale of the next step. `every` 0: it never changes."""

    value: float = 65536.0
    every: int = 2000
    rule: str = "torch"
    good_steps: int = 0

    @property
    def is_dynamic(self) -> bool:
        return self.every > 0

    def explains(self, loss: float, norm: float) -> bool:
        """Whether a gradient that is not finite can be the work of the scale: the loss is not."""
        return (
            self.is_dynamic
            and math.isfinite(loss)
            and not math.isfinite(norm)
            and (self.value > LEAST)
        )

    def overflowed(self) -> None:
        """The step was skipped."""
        self.value, self.good_steps = max(self.value / 2, LEAST), 0

    def went_well(self) -> None:
        """The step was made."""
        if not self.is_dynamic:
            return
        self.good_steps += 1
        if self.good_steps >= self.every + (self.rule == "tf_cnn"):
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """What later steps depend on, as plain values."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


def parse_loss_scale(text: str) -> LossScale:
    """`dynamic`, `dynamic:initial=1024,every=100,rule=tf_cnn`, or a number that stays."""
    fixed = _number(text)
    if fixed is not None and 0 < fixed < math.inf:
        return LossScale(fixed, every=0)
    asked = f"--loss-scale {text}"
    try:
        choice = parse_choice(text)
    except RequestError as error:
        raise _no_scale(asked, error.found) from None
    if choice.name != "dynamic" or fixed is not None:
        raise _no_scale(asked, repr(choice.name))
    values = read_all(choice.options, OPTIONS, asked, "a dynamic scale")
    return LossScale(values["initial"], values["every"], values["rule"])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _no_scale(asked: str, found: str) -> RequestError:
    return RequestError(
        asked=asked,
        found=found,
        why="a loss scale is `dynamic`, or a positive number that stays as it is",
        do="--loss-scale dynamic, dynamic:initial=1024,every=100, or for example 1024",
    )
