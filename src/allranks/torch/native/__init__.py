"""What the loops in C of several rooms share, and how they are found."""

from __future__ import annotations

import importlib
from types import ModuleType


def built(module: str) -> ModuleType | None:
    """The module of this name, or nothing where no compiler was there at installation."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
