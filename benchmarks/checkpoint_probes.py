"""Probes around the parts of our own save and load, for `checkpoint.py --profile`.

A probe times every call of one function. Parts that lie within others count in both: the indent of
the labels says what lies in what. What is not there any more is said, not passed over.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any
from unittest import mock

from harness import say

ON_DISK = "allranks.checkpoint"
ON_TORCH = "allranks.torch"
OF_TORCH = f"{ON_TORCH}.checkpoint"
PROBES = (
    ("call of save", f"{ON_TORCH}.saving:Saving.save"),
    ("  replicas compared", f"{ON_TORCH}.witness.witness:Witness.compare_replicas"),
    ("    digests of this rank", f"{ON_TORCH}.witness.replicas:digest"),
    ("  random streams", f"{ON_TORCH}.saving:random_streams"),
    ("  facts", f"{ON_TORCH}.saving:facts"),
    ("  wait for the last save", f"{ON_DISK}.checkpointer:Checkpointer.wait"),
    ("  flatten", f"{OF_TORCH}.checkpointer:flatten"),
    ("  plan", f"{OF_TORCH}.plan:Planner.plan"),
    ("  copy", f"{OF_TORCH}.storage:Snapshot.take"),
    ("    make room", f"{OF_TORCH}.storage:Snapshot._lay_out"),
    ("thread: commit", f"{ON_DISK}.commit:Commit.run"),
    ("  write file", f"{ON_DISK}.commit:write_file"),
    ("  fsync of folders", f"{ON_DISK}.commit:fsync_folder"),
    ("  prune", f"{ON_DISK}.commit:Commit._prune"),
    ("load", f"{ON_DISK}.checkpointer:Checkpointer.load"),
    ("  verify", f"{ON_DISK}.newest:verify_files"),
    ("  make tensors", f"{OF_TORCH}.loading:Reader._target"),
    ("  read tensors", f"{OF_TORCH}.loading:read_files"),
    ("into model and optimizer", f"{ON_TORCH}.strategies.base:Strategy.load_state"),
    ("anywhere: exchange of texts", f"{ON_TORCH}.comm:Comm.gather_texts"),
    ("anywhere: posix_fallocate", "os:posix_fallocate"),
    ("anywhere: write", "os:write"),
    ("anywhere: fsync", "os:fsync"),
)
DIGESTS = (
    ("anywhere: digest, writing", f"{ON_DISK}.writing:blake2b"),
    ("anywhere: digest, verifying", f"{ON_DISK}.folder:blake2b"),
)


class Probes:
    """Seconds and calls of every part, summed since the last `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[float]] = {}

    def clear(self) -> None:
        self._found.clear()

    def add(self, label: str, wall_s: float, cpu_s: float) -> None:
        with self._lock:
            sums = self._found.setdefault(label, [0, 0.0, 0.0])
            sums[:] = [sums[0] + 1, sums[1] + wall_s, sums[2] + cpu_s]

    def parts(self, times: int) -> list[dict[str, Any]]:
        """The mean of each part over `times` saves or loads, in the order of the table."""
        labels = [label for label, _ in (*PROBES, *DIGESTS) if label in self._found]
        return [
            {
                "part": label,
                "calls": self._found[label][0] / times,
                "wall_ms": self._found[label][1] / times * 1e3,
                "cpu_ms": self._found[label][2] / times * 1e3,
            }
            for label in labels
        ]

    def around(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed: on the clock, and on the processor by its thread."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(label, time.perf_counter() - start, time.thread_time() - cpu)

        return timed

    def digest(self, label: str, algorithm: Callable[..., Any]) -> Callable[..., Any]:
        """The digest, its updates timed."""

        class Timed:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._digest = algorithm(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._digest, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            timed = Timed(*args, **kwargs)
            timed.update = self.around(label, timed._digest.update)  # type: ignore[attr-defined]
            return timed

        return make


@contextmanager
def probed() -> Iterator[Probes]:
    """Probes around everything, until it is left."""
    probes = Probes()
    with ExitStack() as stack:
        for table, around in ((PROBES, probes.around), (DIGESTS, probes.digest)):
            for label, where in table:
                owner, name = _owner(where)
                if not hasattr(owner, name):
                    say(f"no probe for {label.strip()!r}: {where} is not there")
                    continue
                timed = around(label, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
        yield probes


def _owner(where: str) -> tuple[Any, str]:
    """The module or class that holds what `where` names; `None` for one that is not there."""
    module, _, path = where.partition(":")
    owner: Any = os if module == "os" else None
    with suppress(ModuleNotFoundError):
        owner = owner or importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each, None)
    return owner, name
