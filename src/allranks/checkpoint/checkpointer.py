"""Saves and loads checkpoints, on all ranks together: what is committed, is committed for all.

A save makes training wait for one copy in memory; a thread does the rest (`commit`). Two parts are
handed in: how a state becomes bytes in memory and is read again, which is the engine's (`Copies`),
and who of the ranks writes (`writers`).
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
    """What one rank writes of a state: `take` copies its tensors into the `snapshot`.

    The rest is as in `Save`.
    """

    common: Any
    own: Any
    tensors: Callable[[list[str]], dict[str, SavedTensor]]
    snapshot: TensorSnapshot
    take: Callable[[], None]


class Copies(Protocol):
    """How one engine copies a state into memory, and reads it again."""

    def plan(self, ranks: Ranks, step: int, common: Any, own: Any) -> Planned:
        """What this rank writes; raises `RequestError` for a state that cannot be saved."""
        ...

    def reader(self, ranks: Ranks, templates: Any) -> Callable[[Path, Manifest], Loaded]:
        """What reads a checkpoint whose digests hold; raises `BadCheckpoint`."""
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
        self, step: int, common: Any, own: Any, about: About, *, blocking: bool = False
    ) -> None:
        """Save `common`, which all ranks hold, and `own`, which is this rank's. All ranks call it.

        Waits for the save before it, copies, and returns while a thread writes; the state may then
        change. With `blocking` it returns when all is over. A step that was the last to be saved or
        loaded here is not saved again. Where the leader writes alone, only its state is looked at.
        """
        begun = time.monotonic()
        self.wait()
        if step == self._done_step:
            return
        ranks = self._ready()
        self._under_way = step
        if self.writers.writes:
            planned = self._copies.plan(ranks, step, common, own)
            save = self._take(step, planned, about.frozen(), begun)
            self.writers.begin(lambda writing: Commit(self._rules, writing, save).run())
        if blocking:
            self.wait()

    def wait(self) -> bool:
        """Return when the save under way is over: whether it was committed, on all ranks alike.

        Raises what its thread raised: `PeerLost`, if another rank went away.
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
        """The newest checkpoint that is whole, of the first source that has one. All ranks call it.

        A source is a folder of checkpoints, or a single one. What is not whole is reported, and
        set aside if it lies in this run's own folder. `templates` are tensors, by path, to be
        filled in place, where the engine can. `take` goes on from what was read; where it fails
        the one before is tried. None if there is no checkpoint.
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
        """Wait for the save under way. An error that nobody has seen yet is reported, not raised.

        Where this rank `failed` nothing is waited for: the others may never take part in it.
        """
        self._under_way = None
        try:
            self.writers.close(failed=failed)
        except Exception as error:
            rank = self.writers.ranks.rank
            self._rules.report("checkpoint_failed", step=None, rank=rank, error=named(error))
        self.writers.leave(failed=failed)

    def _ready(self) -> Ranks:
        """The ranks that agree; the first call clears away what dead attempts left."""
        return self.writers.ready(lambda: checkpoint_folder.sweep(self._rules.folder))

    def _take(self, step: int, planned: Planned, about: dict[str, Any], begun: float) -> Save:
        """The save after its snapshot; what the machine lacks for one is not raised."""
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
            own=planned.own,
            about=about,
            begun=begun,
            stall_s=0.0,
            failed=failed,
        )
        return replace(save, stall_s=time.monotonic() - begun)
