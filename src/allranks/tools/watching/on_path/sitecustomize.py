"""What Python imports as it starts in a watched script: waits for torch, then watches it.

Only `allranks check -- …` puts this folder on PYTHONPATH. A `sitecustomize` that was there before
is run as well. Where there is no torch, or none of allranks, the script runs as if unwatched.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

FOLDER = "ALLRANKS_WATCHED"


class AfterTorch:
    """Finds torch as the others do, and calls the watcher once it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """That of torch, with a loader that tells us of its end; None for all other modules."""
        if name != "torch":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                _watch(module)

            loader.exec_module = exec_module
        return spec


def _watch(torch: ModuleType) -> None:
    try:
        install = importlib.import_module("allranks.tools.watching.install")
    except ImportError:  # another Python than that of allranks: the parent says so
        return
    install.install(torch, os.environ[FOLDER])


def _run_the_other() -> None:
    """The `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(FOLDER):
    sys.meta_path.insert(0, AfterTorch())
    _run_the_other()
