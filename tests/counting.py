"""How often functions are called: what a test bounds where it must not time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls_of(act: Callable[[], Any]) -> int:
    """How many calls of Python functions `act()` makes, without those of the garbage collector."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
