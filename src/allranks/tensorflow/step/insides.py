"""What is within a step, beside its result: the gradients on their way, for who traces a training.

They leave the graph only where somebody looks.
"""

from __future__ import annotations

from typing import Any, Protocol

MAGNITUDE = "magnitude"
Insides = list[dict[str, Any]]
"""For each local replica: `stage/number` -> the gradient of that variable; `MAGNITUDE` -> the size
of the losses."""


class Probe(Protocol):
    """Looks into steps. `replica` counts those of this process."""

    def begin(self, batch: Any) -> None:
        """A step begins."""

    def inside(self, replica: int, found: dict[str, Any]) -> None:
        """What was within it, on one of the local replicas."""


def by_replica(local: Any, inside: dict[str, Any]) -> Insides:
    """Of what replicas have returned, for each of them by itself; `local` lists their values."""
    values = {name: local(value) for name, value in inside.items()}
    count = min(map(len, values.values()), default=0)
    return [{name: found[n] for name, found in values.items()} for n in range(count)]


def named(stage: str, gradients: list[Any]) -> dict[str, Any]:
    """The gradients that there are, by stage and the place of their variable."""
    return {f"{stage}/{n}": g for n, g in enumerate(gradients) if g is not None}
