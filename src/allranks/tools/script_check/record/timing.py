"""Times the steps of a script for `allranks bench -- …`: one fact for each step of an optimizer.

It reads the clock and counts samples, and looks at no tensor: `allranks check -- …` records far
more, and slows a script down.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary, ref

from allranks.tools.script_check.record.facts import ScriptFacts, note_after, note_before


class LoaderCounts:
    """The samples of one iterator of a loader, from their request to a backward pass."""

    def __init__(self) -> None:
        self.requested: deque[int | None] = deque()
        self.pending: int | None = 0
        """Samples read since the last backward; `None` if a batch had no size."""


class StepTimes:
    """The steps of the optimizer that steps first in this process.

    A batch counts as samples of a step if a backward pass follows it; one of an evaluation does
    not.
    """

    def __init__(self, torch: Any, facts: ScriptFacts) -> None:
        self.torch, self.facts = torch, facts
        self._optimizer: ref[Any] | None = None
        self._counts: WeakKeyDictionary[Any, LoaderCounts] = WeakKeyDictionary()
        self._latest: LoaderCounts | None = None
        self._read: set[LoaderCounts] = set()
        self._trained: set[LoaderCounts] = set()
        self._samples: int | None = 0
        self._steps = 0

    def install(self) -> None:
        """Register hooks around each step; wrap backward and the iterators of loaders."""
        optimizer = importlib.import_module("torch.optim.optimizer")
        loading = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
        guarded = self.facts.guarded
        optimizer.register_optimizer_step_pre_hook(guarded(self._before))
        optimizer.register_optimizer_step_post_hook(guarded(self._after))
        note_before(self.torch.autograd, "backward", guarded(self._backward))
        note_after(loading, "_next_index", guarded(self._requested))
        note_after(loading, "__next__", guarded(self._received))

    def _requested(self, index: Any, iterator: Any) -> None:
        size = len(index) if isinstance(index, list | tuple) else None
        self._counts.setdefault(iterator, LoaderCounts()).requested.append(size)

    def _received(self, batch: Any, iterator: Any) -> None:
        counts = self._counts.setdefault(iterator, LoaderCounts())
        size = counts.requested.popleft() if counts.requested else None
        known = size is not None and counts.pending is not None
        counts.pending = counts.pending + size if known else None  # type: ignore[operator]
        self._latest = counts
        self._read.add(counts)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        counts = self._latest
        if counts is None:
            return
        self._trained.add(counts)
        known = self._samples is not None and counts.pending is not None
        self._samples = self._samples + counts.pending if known else None  # type: ignore[operator]
        counts.pending = 0

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        self._steps += 1
        self.facts.write(
            "step",
            **self._place(),
            step=self._steps,
            monotonic=time.monotonic(),
            samples=self._samples,
            evaluated=not self._read <= self._trained,
            host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        self._samples = 0
        self._read.clear()
        self._trained.clear()

    def _place(self) -> dict[str, int | bool]:
        """The number of this rank, and whether it has joined a process group."""
        dist = self.torch.distributed
        joined = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if joined else os.environ.get("RANK", 0)
        return {"rank": int(rank), "joined": joined}


def time_here(folder: str) -> None:
    """Time the steps of this process, which has imported torch; facts go to `folder`."""
    torch = importlib.import_module("torch")
    assert torch.__file__ is not None
    facts = ScriptFacts(folder, os.path.dirname(torch.__file__))
    facts.guarded(StepTimes(torch, facts).install)()
