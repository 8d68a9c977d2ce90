"""Python imports this at its start in a script with hooks: it waits for torch, and patches it.

Only `allranks check -- …`, `bench -- …` and `run --shared-memory` put this folder on PYTHONPATH. It
also runs the `sitecustomize` that it hides. Without torch, or without allranks, the script runs
unpatched.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

OUTCOME = "ALLRANKS_IN_PLACE_OF_GLOO"
HOOKS = {
    OUTCOME: ("allranks.torch.shared_memory.backend", "in_place_of_gloo"),
    "ALLRANKS_WATCHED": ("allranks.tools.script_check.record.install", "watch_here"),
    "ALLRANKS_TIMED": ("allranks.tools.script_check.record.timing", "time_here"),
}
"""Variable -> the function that gets its value, once torch has been imported."""


class AfterTorch:
    """A finder that calls the hooks once torch has been imported.

    `find_spec("torch")`, by which datasets and transformers ask for it, imports nothing: so the
    finder stays until torch is there.
    """

    asks = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch, with a loader that calls the hooks; None for all other modules."""
        if name != "torch" or self.asks:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                _change()

            loader.exec_module = exec_module
        return spec


def _change() -> None:
    atexit.register(wait_for_gloo)  # before the hooks register theirs: it is called after them
    for variable, (module, function) in HOOKS.items():
        if value := os.environ.get(variable):
            try:
                hook = getattr(importlib.import_module(module), function)
            except ImportError as error:  # another Python than that of allranks: the parent says so
                if variable == OUTCOME:
                    _say_not_done(value, str(error))
                continue
            hook(value)


IDLE_LOOKS = 4
MOST_LOOKS = 2000


def wait_for_gloo() -> None:
    """Wait until the threads of Gloo have freed the tensors of collectives; some seconds at most.

    A thread does so after the collective is over, and may need the GIL for it. If Python is ending
    by then, the GIL ends the thread, which aborts the process ("terminate called without an active
    exception"). `destroy_process_group` does not end these threads while a DDP has the group. A
    thread that only waits for the GIL runs as soon as this one sleeps: it is idle when it sleeps in
    a few looks in a row.
    """
    looks = 0
    for _ in range(MOST_LOOKS):
        time.sleep(0.001)
        looks = 0 if _gloo_runs() else looks + 1
        if looks == IDLE_LOOKS:
            return


def _gloo_runs() -> bool:
    for task in Path("/proc/self/task").glob("*"):
        try:
            name, _, state = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        except OSError:  # it has ended
            continue
        if name == "pt_gloo_runloop" and not state.startswith("S"):
            return True
    return False


def _say_not_done(path: str, why: str) -> None:
    """Write the outcome that `in_place_of_gloo` would have written."""
    outcome = {"asked": "shared_memory", "did": "gloo", "why": f"{sys.executable}: {why}"}
    with open(path, "w") as file:
        json.dump(outcome, file)


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
