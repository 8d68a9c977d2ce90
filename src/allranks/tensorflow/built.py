"""A model with its optimizer, as it was built for a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BuiltKerasModel:
    """A model and its optimizer; `swapped` names the layers that were swapped in.

    `made_rate` is the learning rate as the task made it, before any step; `None` where a schedule
    of Keras decides it. `not_pretrained` are weights that the task's
    `pretrained` does not name: none.
    """

    model: Any
    optimizer: Any
    swapped: dict[str, list[str]]
    made_rate: float | None
    not_pretrained: list[str] = field(default_factory=list)
