"""Modules of this package in C, where a compiler was there when it was installed."""

from __future__ import annotations

import importlib
from types import ModuleType


def built(module: str) -> ModuleType | None:
    """The module of this name, or nothing where it was not compiled."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
