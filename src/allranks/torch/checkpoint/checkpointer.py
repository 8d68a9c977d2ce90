"""The checkpoints of a training with torch: every rank writes its part, as all have agreed.

What a save and a load are is in `allranks.checkpoint`; which tensors a rank reads is in `loading`,
who writes what in `plan`, the copy in memory in `storage`, what a tensor may be in `tree`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from allranks.checkpoint import checkpointer
from allranks.checkpoint.checkpointer import Planned
from allranks.checkpoint.commit import Ranks
from allranks.checkpoint.manifest import Manifest
from allranks.checkpoint.newest import Loaded
from allranks.checkpoint.writers import EveryRank
from allranks.torch.checkpoint.loading import Reader, Templates
from allranks.torch.checkpoint.plan import Planner
from allranks.torch.checkpoint.storage import Snapshot
from allranks.torch.checkpoint.tree import flatten
from allranks.torch.comm.comm import Comm


class TensorCopies:
    """Copies of tensors in memory, and which rank writes which; one for each rank."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._planner: Planner | None = None

    def plan(self, ranks: Ranks, step: int, common: Any, own: Any) -> Planned:
        """Sends one digest; the plans too, when one has changed."""
        skeleton, tensors = flatten(common, "common")
        own_skeleton, own_tensors = _own(ranks, own)
        plan, writes = self._planning(ranks).plan(step, {**own_tensors, **tensors})
        take = partial(self._snapshot.take, writes)
        return Planned(skeleton, own_skeleton, plan.tensors, self._snapshot, take)

    def preparation(self, ranks: Ranks, common: Any, own: Any) -> Callable[[], None]:
        """What a thread does before the first save: it plans, and takes the memory for a copy."""
        tensors = {**_own(ranks, own)[1], **flatten(common, "common")[1]}

        def act() -> None:
            writes = self._planning(ranks).plan(-1, tensors)[1]
            with suppress(MemoryError):  # the save tries again, and tells
                self._snapshot.make_room(writes)

        return act

    def reader(
        self, ranks: Ranks, templates: Templates | None
    ) -> Callable[[Path, Manifest], Loaded]:
        """Reads what all ranks hold, and what is this rank's, if as many ranks have saved it."""
        return Reader(ranks.rank, ranks.size, templates or {}).read

    def _planning(self, ranks: Ranks) -> Planner:
        if self._planner is None or self._planner.comm is not ranks:
            self._planner = Planner(ranks)
        return self._planner


class Checkpointer(checkpointer.Checkpointer):
    """The checkpoints of one run of torch; `rules` are those of all engines.

    A thread of each rank has a communicator of its own, beside `comm`.
    """

    def __init__(self, folder: Path, comm: Comm, **rules: Any) -> None:
        self._tensors = TensorCopies()
        super().__init__(folder, EveryRank(comm), self._tensors, **rules)

    def prepare(self, common: Any, own: Any) -> None:
        """Plan, and take the memory of the snapshot, so that the first save is like all others.

        All ranks call this once the state has all its tensors (after the first step); a thread
        does it.
        """
        self.wait()
        self.writers.thread.start(self._tensors.preparation(self._ready(), common, own))


def _own(ranks: Ranks, own: Any) -> tuple[Any, dict[str, Tensor]]:
    return flatten(own, f"own/{ranks.rank}")
