"""A device in every rank of a test: `on_device(2, "as_on_the_cpu", {...})`.

A process has one PrivateUse1 for good, so none is installed here: what runs is a function of
`pretended.workers`, in processes that end with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OnDevice = Callable[..., None]


@pytest.fixture
def on_device(on_ranks: Callable[..., Any]) -> OnDevice:
    """Call a function of `pretended.workers` in so many ranks; what it raises fails the test."""

    def run(ranks: int, name: str, argument: Any = None) -> None:
        on_ranks(ranks, f"pretended.workers:{name}", argument)

    return run
