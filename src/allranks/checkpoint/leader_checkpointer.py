"""Saves and loads checkpoints where all ranks hold the same: the leader writes for all of them.

A rank of tf.distribute is a replica, so one copy is the whole state. A second thread that sends
texts beside the training would disturb TensorFlow's collectives, so the thread that writes sends
nothing: only the leader has one, and the ranks hear how it fared from the thread that trains, when
they come to the next save, or wait. The commit, the files and the search for the newest whole
checkpoint are those of all engines (`commit`, `newest`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.about import About, check_best
from allranks.checkpoint.array_snapshot import Snapshot, flatten, read_arrays
from allranks.checkpoint.commit import ALONE, Commit, Ranks, Rules, Save, named
from allranks.checkpoint.manifest import Manifest, Reach, nothing, step_folder
from allranks.checkpoint.newest import Loaded, Search, values_of
from allranks.checkpoint.tensors import TensorFiles
from allranks.checkpoint.thread import Aside
from allranks.checkpoint.tree import unflatten
from allranks.errors import PeerLost

COMMON = "common"


class Checkpointer:
    """The checkpoints of one run, seen from one rank. Every rank makes one, with the same values.

    Every rank calls `save`, `wait` and `load` in the same order, from the thread that trains: they
    exchange texts by `comm`. `reach(point, step)` is called on the leader at named points of a
    save, for the injection of faults; `report` with an event and its values, also from the thread
    that writes: `checkpoint`, `checkpoint_failed`, `checkpoint_skipped`, `checkpoints_not_pruned`.
    `best` is `max:metric` or `min:metric`: that checkpoint is kept beside the `keep` newest.
    """

    def __init__(
        self,
        folder: Path,
        comm: Ranks,
        *,
        keep: int = 3,
        best: str = "",
        attempt: int = 0,
        reach: Reach = nothing,
        report: Callable[..., None] = nothing,
    ) -> None:
        check_best(best)
        self._rules = Rules(folder, keep, best, attempt, reach, report)
        self._comm = comm
        self._is_leader = comm.rank == 0
        self._snapshot = Snapshot()
        self._thread = Aside()
        self._is_swept = False
        self._stands = False  # leader: what the thread found
        self._under_way: int | None = None
        self._committed = True
        self._done_step = -1

    def save(self, step: int, state: Any, about: About, *, blocking: bool = False) -> None:
        """Save `state`: nested dicts, lists and tuples of numpy arrays and plain values.

        Only the leader's is looked at. Waits for the save before it, copies, and returns while the
        leader's thread writes; the state may then change. With `blocking` it returns when all is
        over. A step that was the last to be saved or loaded here is not saved again.
        """
        begun = time.monotonic()
        self.wait()
        if step == self._done_step:
            return
        self._under_way = step
        if self._is_leader:
            self._sweep()
            self._stands = False
            save = self._take(step, state, about.frozen(), begun)
            self._thread.start(lambda: self._commit(save))
        if blocking:
            self.wait()

    def wait(self) -> bool:
        """Return when the save under way is over: whether it was committed, on all ranks alike.

        Sends one text if there was one. Raises what the leader's thread raised, and on the other
        ranks `PeerLost`.
        """
        if self._under_way is None:
            return self._committed
        step, self._under_way = self._under_way, None
        error = self._joined()
        said = json.dumps([self._stands, "" if error is None else named(error)])
        self._committed, failure = json.loads(self._comm.gather_texts(said)[0])
        if error is not None:
            raise error
        if failure:
            raise PeerLost(f"the checkpoint of step {step} failed on rank 0: {failure}")
        self._done_step = step if self._committed else self._done_step
        return self._committed

    def load(self, sources: list[Path]) -> Loaded | None:
        """The newest checkpoint that is whole, of the first source that has one.

        A source is a folder of checkpoints, or a single one. What is not whole is reported, and
        set aside if it lies in this run's own folder. None if there is no checkpoint. Its `common`
        is the state that was saved; each rank reads all of it.
        """
        self.wait()
        if self._is_leader:
            self._sweep()  # nobody looks before the leader has: the search begins with its list
        search = Search(self._comm, self._rules.folder, read_checkpoint, self._rules.report)
        loaded = search.newest(sources)
        if loaded is not None:
            here = step_folder(self._rules.folder, loaded.step)
            self._done_step = loaded.step if here.resolve() == loaded.path.resolve() else -1
        return loaded

    def close(self) -> None:
        """Wait for the save under way; sends nothing. An error that nobody has seen is reported."""
        error = self._joined()
        if error is not None:
            self._rules.report("checkpoint_failed", step=None, rank=0, error=named(error))
        self._under_way = None

    def _sweep(self) -> None:
        """Clear away, once, what dead attempts left."""
        if not self._is_swept:
            checkpoint_folder.sweep(self._rules.folder)
            self._is_swept = True

    def _take(self, step: int, state: Any, about: dict[str, Any], begun: float) -> Save:
        """The snapshot. What is wrong with the state is raised; what the machine lacks is not."""
        skeleton, arrays = flatten(state, COMMON)
        failed = ""
        try:
            self._rules.reach("save:snapshot", step)
            self._snapshot.take(arrays)
        except (OSError, MemoryError) as error:
            failed = named(error)
        save = Save(
            step=step,
            ranks=self._comm.size,
            tensors=self._snapshot.tensors,
            snapshot=self._snapshot,
            common=skeleton,
            own=None,
            about=about,
            begun=begun,
            stall_s=0.0,
            failed=failed,
        )
        return replace(save, stall_s=time.monotonic() - begun)

    def _commit(self, save: Save) -> None:
        self._stands = Commit(self._rules, ALONE, save).run()

    def _joined(self) -> Exception | None:
        """Wait for the thread; what it raised."""
        try:
            self._thread.wait()
        except Exception as error:
            return error
        return None


def read_checkpoint(folder: Path, manifest: Manifest) -> Loaded:
    """What a checkpoint whose digests hold has in it; raises `BadCheckpoint`."""
    common, _ = values_of(manifest)
    with TensorFiles(folder) as files:
        arrays = read_arrays(files, manifest, COMMON)
    return Loaded(manifest.step, folder, manifest, unflatten(common, arrays), None)
