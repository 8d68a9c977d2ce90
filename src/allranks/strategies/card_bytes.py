"""What common ways to sum cost: bytes that the busiest rank sends in a step, for the cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import Workload


def no_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Nothing is sent."""
    return 0


def ring_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """A ring all-reduce of every message: 2(N-1)/N of its bytes."""
    return round(2 * (work.ranks - 1) / work.ranks * sum(work.messages))


RING = "2(N-1)/N · (gradients + tally)"
