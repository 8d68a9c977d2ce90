"""Saves and loads checkpoints, on all ranks together: what is committed, is committed for all.

A save makes training wait for one copy in memory (`storage`); the rest is done by a thread, by the
protocol that all engines share (`allranks.checkpoint`). Which tensors a rank reads is in `loading`,
who writes what in `plan`, what a tensor of a state may be in `tree`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.about import About, check_best
from allranks.checkpoint.commit import Commit, Rules, Save, named
from allranks.checkpoint.manifest import Reach, nothing, step_folder
from allranks.checkpoint.newest import Loaded, Search
from allranks.checkpoint.thread import Aside
from allranks.torch.checkpoint.loading import Reader
from allranks.torch.checkpoint.plan import Planner
from allranks.torch.checkpoint.storage import Snapshot
from allranks.torch.checkpoint.tree import flatten
from allranks.torch.comm import Comm


class Checkpointer:
    """The checkpoints of one run, seen from one rank. Every rank makes one, with the same values.

    `reach(point, step)` is called at named points of a save, for the injection of faults. `report`
    is called with an event and its values, also from the thread that writes; by the leader
    `checkpoint`, `checkpoint_failed`, `checkpoint_skipped` and `checkpoints_not_pruned`. `best` is
    `max:metric` or `min:metric`: that checkpoint is kept beside the `keep` newest.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        *,
        keep: int = 3,
        best: str = "",
        attempt: int = 0,
        reach: Reach = nothing,
        report: Callable[..., None] = nothing,
    ) -> None:
        check_best(best)
        self._rules = Rules(folder, keep, best, attempt, reach, report)
        self._training = comm
        self._aside: Comm | None = None
        self._snapshot = Snapshot()
        self._thread = Aside()
        self._committed = True
        self._done_step = -1

    def save(
        self, step: int, common: Any, own: Any, about: About, *, blocking: bool = False
    ) -> None:
        """Save `common`, which all ranks hold, and `own`, which is this rank's. All ranks call it.

        Waits for the save before it, copies, and returns while a thread writes; the state may then
        change. With `blocking` it returns when all is over. A step that was the last to be saved or
        loaded here is not saved again. Sends one digest; the plans too, when one has changed.
        """
        begun = time.monotonic()
        self.wait()
        if step == self._done_step:
            return
        comm = self._ready()
        save = self._take(step, common, own, about.frozen(), begun)
        self._thread.start(lambda: self._commit(comm, save))
        if blocking:
            self.wait()

    def prepare(self, common: Any, own: Any) -> None:
        """Plan, and take the memory of the snapshot, so that the first save is like all others.

        All ranks call this once the state has all its tensors (after the first step); a thread
        does it.
        """
        self.wait()
        self._ready()
        tensors = {**self._own(own)[1], **flatten(common, "common")[1]}

        def act() -> None:
            writes = self._planner.plan(-1, tensors)[1]
            with suppress(MemoryError):  # the save tries again, and tells
                self._snapshot.make_room(writes)

        self._thread.start(act)

    def wait(self) -> bool:
        """Return when the save under way is over: whether it was committed, on all ranks alike.

        Raises what its thread raised: `PeerLost`, if another rank went away.
        """
        self._thread.wait()
        return self._committed

    def load(
        self, sources: list[Path], templates: dict[str, Tensor] | None = None
    ) -> Loaded | None:
        """The newest checkpoint that is whole, of the first source that has one. All ranks call it.

        A source is a folder of checkpoints, or a single one. What is not whole is reported, and
        set aside if it lies in this run's own folder. `templates` are tensors, by path, to be
        filled in place. None if there is no checkpoint.
        """
        self.wait()
        comm = self._ready()
        reader = Reader(comm.rank, comm.size, templates or {})
        search = Search(comm, self._rules.folder, reader.read, self._rules.report)
        loaded = search.newest(sources)
        if loaded is not None:
            here = step_folder(self._rules.folder, loaded.step)
            self._done_step = loaded.step if here.resolve() == loaded.path.resolve() else -1
        return loaded

    def close(self, *, failed: bool = False) -> None:
        """Wait for the save under way. An error that nobody has seen yet is reported, not raised.

        Where this rank `failed` nothing is waited for: the others may never take part in it.
        """
        try:
            if not failed or self._training.size == 1:
                self.wait()
        except Exception as error:
            rank = self._training.rank
            self._rules.report("checkpoint_failed", step=None, rank=rank, error=named(error))
        if self._aside is not None:
            self._aside.leave(failed=failed)
            self._aside = None

    def _ready(self) -> Comm:
        """The communicator of the thread; the first call clears away what dead attempts left."""
        if self._aside is None:
            aside = self._training.aside()
            if aside.rank == 0:
                checkpoint_folder.sweep(self._rules.folder)
            aside.barrier()
            self._planner = Planner(aside)
            self._aside = aside
        return self._aside

    def _take(self, step: int, common: Any, own: Any, about: dict[str, Any], begun: float) -> Save:
        """The snapshot. What is wrong with the state is raised; what the machine lacks is not."""
        skeleton, tensors = flatten(common, "common")
        own_skeleton, own_tensors = self._own(own)
        plan, writes = self._planner.plan(step, {**own_tensors, **tensors})
        failed = ""
        try:
            self._rules.reach("save:snapshot", step)
            self._snapshot.take(writes)
        except (OSError, MemoryError) as error:
            failed = named(error)
        save = Save(
            step=step,
            ranks=self._training.size,
            tensors=plan.tensors,
            snapshot=self._snapshot,
            common=skeleton,
            own=own_skeleton,
            about=about,
            begun=begun,
            stall_s=0.0,
            failed=failed,
        )
        return replace(save, stall_s=time.monotonic() - begun)

    def _own(self, own: Any) -> tuple[Any, dict[str, Tensor]]:
        return flatten(own, f"own/{self._training.rank}")

    def _commit(self, comm: Comm, save: Save) -> None:
        self._committed = False
        self._committed = Commit(self._rules, comm, save).run()
        self._done_step = save.step if self._committed else self._done_step
