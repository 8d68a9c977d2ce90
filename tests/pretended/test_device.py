"""The pretended device by itself: what it refuses, and what it counts as a wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_misuses_and_waits_are_told(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "pretended.misuses:are_told", None)
