"""The C library, if it was compiled where this was installed."""

from __future__ import annotations

import importlib
from types import ModuleType

MODULE = "allranks.torch.shared_memory._collectives"
NOT_BUILT = "the library for it was not compiled where allranks was installed (no C compiler?)"


def library() -> ModuleType | None:
    """The module `_collectives`, or nothing where it was not compiled."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None
