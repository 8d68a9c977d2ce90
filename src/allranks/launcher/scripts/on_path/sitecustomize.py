"""What Python imports as it starts in a script that is changed: waits for torch, then changes it.

Only `allranks check -- …` and `allranks run --shared-memory` put this folder on PYTHONPATH. A
`sitecustomize` that was there before is run as well. Where there is no torch, or none of allranks,
the script runs as if unchanged.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

OUTCOME = "ALLRANKS_IN_PLACE_OF_GLOO"
HOOKS = {
    OUTCOME: ("allranks.torch.shared_memory.in_scripts", "in_place_of_gloo"),
    "ALLRANKS_WATCHED": ("allranks.tools.script_check.record.install", "watch_here"),
}
"""A variable -> what is called with its value, once torch has been imported."""


class AfterTorch:
    """Finds torch as the others do, and calls the hooks once it has been imported."""

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
                _change()

            loader.exec_module = exec_module
        return spec


def _change() -> None:
    for variable, (module, function) in HOOKS.items():
        if value := os.environ.get(variable):
            try:
                hook = getattr(importlib.import_module(module), function)
            except ImportError as error:  # another Python than that of allranks: the parent says so
                if variable == OUTCOME:
                    _say_not_done(value, str(error))
                continue
            hook(value)


def _say_not_done(path: str, why: str) -> None:
    """In place of what `in_place_of_gloo` would write."""
    told = {"asked": "shared_memory", "did": "gloo", "why": f"{sys.executable}: {why}"}
    with open(path, "w") as file:
        json.dump(told, file)


def _run_the_other() -> None:
    """The `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if any(os.environ.get(variable) for variable in HOOKS):
    sys.meta_path.insert(0, AfterTorch())
    _run_the_other()
