"""Saves and loads checkpoints, on all ranks together: a commit is a commit for all.

A save blocks training for one copy in memory; then a thread writes (`commit`). Two parts depend on
the engine: how a state is copied to memory and read again (`Copies`), and which ranks write
(`writers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.commit import Commit, Ranks, Rules, Save, TensorSnapshot, Writers, named
from allranks.checkpoint.format import (
    About,
    Manifest,
    Reach,
    SavedTensor,
    check_best,
    nothing,
    step_folder,
)
from allranks.checkpoint.newest import Loaded, Search


@dataclass(frozen=True)
class Planned:
    """The part of a state that one rank writes: `take` copies its tensors into the `snapshot`.

    The other fields are as in `Save`.
    """

    common: Any
    rank_state: Any
    tensors: Callable[[list[str]], dict[str, SavedTensor]]
    snapshot: TensorSnapshot
    take: Callable[[], None]


class Copies(Protocol):
    """How one engine copies a state into memory, and reads it again."""

    def plan(self, ranks: Ranks, step: int, common: Any, rank_state: Any) -> Planned:
        """Plan the part of this rank; raises `RequestError` for a state that cannot be saved."""
        ...

    def reader(self, ranks: Ranks, templates: Any) -> Callable[[Path, Manifest], Loaded]:
        """A function that reads a verified checkpoint; it raises `BadCheckpoint`."""
        ...


class Checkpointer:
    """The checkpoints of one run, seen from one rank. Every rank makes one, with the same values.

    Every rank calls its methods in the same order, from the thread that trains. `reach(point,
    step)` is called at named points of a save, for the injection of faults. `report` is called with
    an event and its values, also from the thread that writes; by the leader `checkpoint`,
    `checkpoint_failed`, `checkpoint_skipped` and `checkpoints_not_pruned`. `best` is `max:metric`
    or `min:metric`: that checkpoint is kept beside the `keep` newest.
    """

    def __init__(
        self,
        folder: Path,
        writers: Writers,
        copies: Copies,
        *,
        keep: int = 3,
        best: str = "",
        attempt: int = 0,
        reach: Reach = nothing,
        report: Callable[..., None] = nothing,
    ) -> None:
        check_best(best)
        self._rules = Rules(folder, keep, best, attempt, reach, report)
        self.writers, self._copies = writers, copies
        self._under_way: int | None = None
        self._committed = True
        self._done_step = -1

    def save(
        self, step: int, common: Any, rank_state: Any, about: About, *, blocking: bool = False
    ) -> None:
        """Save `common`, which all ranks hold, and `rank_state` of this rank. All ranks call it.

        Waits for the save before it, copies, and returns while a thread writes; the state may then
        change. With `blocking`, it returns when the save is complete. The step that was last saved
        or loaded here is not saved again. If only the leader writes, only its state is read.
        """
        begun = time.monotonic()
        self.wait()
        if step == self._done_step:
            return
        ranks = self._ready()
        self._under_way = step
        if self.writers.writes:
            planned = self._copies.plan(ranks, step, common, rank_state)
            save = self._take(step, planned, about.frozen(), begun)
            self.writers.begin(lambda writing: Commit(self._rules, writing, save).run())
        if blocking:
            self.wait()

    def wait(self) -> bool:
        """Wait for the running save; returns whether it was committed, the same on all ranks.

        Raises the error of its thread: `PeerLost` if another rank was lost.
        """
        step, self._under_way = self._under_way, None
        if step is None:
            self.writers.thread.wait()
            return self._committed
        self._committed = False
        self._committed = self.writers.outcome(step)
        self._done_step = step if self._committed else self._done_step
        return self._committed

    def load(
        self,
        sources: list[Path],
        templates: Any = None,
        take: Callable[[Loaded], None] = nothing,
    ) -> Loaded | None:
        """Load the newest whole checkpoint of the first source that has one. All ranks call it.

        A source is a folder of checkpoints, or a single one. A damaged checkpoint is reported, and
        renamed if it lies in this run's own folder. `templates` are tensors, by path, to be filled
        in place, if the engine can. `take` loads the state that was read; if it fails, the
        checkpoint before is tried. Returns None if there is no checkpoint.
        """
        self.wait()
        ranks = self._ready()
        reader = self._copies.reader(ranks, templates)
        search = Search(ranks, self._rules.folder, reader, self._rules.report, take)
        loaded = search.newest(sources)
        if loaded is not None:
            here = step_folder(self._rules.folder, loaded.step)
            self._done_step = loaded.step if here.resolve() == loaded.path.resolve() else -1
        return loaded

    def close(self, *, failed: bool = False) -> None:
        """Wait for the running save. An error that was not raised yet is reported, not raised.

        If this rank `failed`, it waits for nothing: the others may never take part in the save.
        """
        self._under_way = None
        try:
            self.writers.close(failed=failed)
        except Exception as error:
            rank = self.writers.ranks.rank
            self._rules.report("checkpoint_failed", step=None, rank=rank, error=named(error))
        self.writers.leave(failed=failed)

    def _ready(self) -> Ranks:
        """The ranks that agree; the first call removes the remains of dead attempts."""
        return self.writers.ready(lambda: checkpoint_folder.sweep(self._rules.folder))

    def _take(self, step: int, planned: Planned, about: dict[str, Any], begun: float) -> Save:
        """The save after its snapshot; a lack of memory or space is recorded, not raised."""
        failed = ""
        try:
            self._rules.reach("save:snapshot", step)
            planned.take()
        except (OSError, MemoryError) as error:
            failed = named(error)
        save = Save(
            step=step,
            ranks=self.writers.ranks.size,
            tensors=planned.tensors,
            snapshot=planned.snapshot,
            common=planned.common,
            rank_state=planned.rank_state,
            about=about,
            begun=begun,
            stall_s=0.0,
            failed=failed,
        )
        return replace(save, stall_s=time.monotonic() - begun)
