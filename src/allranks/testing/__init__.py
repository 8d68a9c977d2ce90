"""Tests of parallel code that uses `torch.distributed` itself: a plugin of pytest.

What a test imports: `shard` and `samples`, which mark a tensor as a part of a whole, and `NotSame`,
the failure of `same_on_ranks`. They are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.testing.compare import NotSame, samples, shard

__all__ = ["NotSame", "samples", "shard"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("allranks.testing.compare"), name)
