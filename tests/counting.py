"""How often functions are called: what a test bounds where it must not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(act: Callable[[], Any]) -> int:
    """How many calls of functions of Python `act()` is made of."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count
