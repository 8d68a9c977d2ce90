"""Saves and loads checkpoints, on all ranks together: a commit is a commit for all.

A save blocks training for one copy in memory; then a thread writes (`commit`). Two parts depend on
the engine: how a state is copied to memory and read again (`Copies`), and which ranks write
(`Writers`).
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.commit import ALONE, Commit, Planned, Ranks, Rules, Save, named
from allranks.checkpoint.folder import candidates, verify_files
from allranks.checkpoint.format import (
    NAME,
    About,
    BadCheckpoint,
    Manifest,
    Reach,
    check_best,
    nothing,
    read_manifest,
    seal,
    step_folder,
)
from allranks.checkpoint.format import digest as digest_of
from allranks.errors import AllranksError, PeerLost, ProgramError, RequestError


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
        self._committed, self._is_swept = True, False
        self.done_step = -1
        self.joins = False
        """Whether others train already, and go on without this rank if it cannot load."""

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
        if step == self.done_step:
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
        self.done_step = step if self._committed else self.done_step
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
        search = Search(ranks, self._rules.folder, reader, self._rules.report, take, self.joins)
        loaded = search.newest(sources)
        if loaded is not None:
            here = step_folder(self._rules.folder, loaded.step)
            self.done_step = loaded.step if here.resolve() == loaded.path.resolve() else -1
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
        """The ranks that plan and search; at first the leader removes what dead attempts left.

        Its first message to the others comes after that, and before it they touch no file.
        """
        if not self._is_swept and self.writers.ranks.rank == 0 and self._rules.folder.is_dir():
            checkpoint_folder.sweep(self._rules.folder)
        self._is_swept = True
        return self.writers.planning

    def _take(
        self, step: int, planned: Planned, about: Callable[[], dict[str, Any]], begun: float
    ) -> Save:
        """The save after its snapshot; a lack of memory or space is recorded, not raised."""
        failed = ""
        try:
            self._rules.reach("save:snapshot", step)
            planned.take()
        except (OSError, MemoryError) as error:
            failed = named(error)
        return Save(
            step=step,
            ranks=self.writers.ranks.size,
            planned=planned,
            about=about,
            begun=begun,
            stall_s=time.monotonic() - begun,
            failed=failed,
        )


# --- writers -------------------------------------------------------------------------------------
# The threads that write a checkpoint while training goes on: of every rank, or of the leader.
#
# If every rank writes its part (`EveryRank`), their threads exchange texts over their own
# communicator. If all ranks hold the same (`LeaderAlone`), the leader's thread writes for all, and
# sends nothing; the training threads exchange the result when they wait.


class BackgroundThread:
    """Runs one function at a time in a thread; its errors are raised by `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Start `act` in a thread, after `wait` has returned for the one before it."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._guarded, args=(act,), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the function is still running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the thread; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error


class Writers(ABC):
    """The writing part of `ranks`, which train together, as one of them sees it.

    `planning` are the same ranks as they plan a save and find a checkpoint, `committing` those that
    the threads write with.
    """

    def __init__(self, ranks: Ranks, planning: Ranks, committing: Ranks) -> None:
        self.ranks, self.planning, self.committing = ranks, planning, committing
        self.thread, self._stands = BackgroundThread(), False

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this rank writes."""

    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        """Start `commit` in the thread of a writing rank; it returns whether the save succeeded."""

        def act() -> None:
            self._stands = commit(self.committing)

        self.thread.start(act)

    @abstractmethod
    def outcome(self, step: int) -> bool:
        """Wait for the save of `step`; returns whether it is committed, the same on every rank.

        Raises the error of the thread, and `PeerLost` if another rank's thread raised one.
        """

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Wait for the thread; not if this rank `failed` and the thread may wait for other ranks.

        Raises the error of the thread.
        """

    def leave(self, *, failed: bool) -> None:
        """Leave the communicator of the threads, if there is one."""

    def _pop_outcome(self) -> bool:
        """The result of the thread, once."""
        stands, self._stands = self._stands, False
        return stands


class Sides(Ranks, Protocol):
    """A communicator in addition to the one that trains."""

    def leave(self, *, failed: bool = False) -> None:
        """Leave the others."""
        ...


class EveryRank(Writers):
    """Each rank writes its part; their threads exchange the results over `second`."""

    writes = True

    def __init__(self, ranks: Ranks, second: Sides) -> None:
        super().__init__(ranks, second, second)
        self._second = second

    def outcome(self, step: int) -> bool:
        self.thread.wait()
        return self._pop_outcome()

    def close(self, *, failed: bool) -> None:
        if not failed or self.ranks.size == 1:
            self.thread.wait()

    def leave(self, *, failed: bool) -> None:
        self._second.leave(failed=failed)


class LeaderAlone(Writers):
    """The leader writes the state of all ranks; the training threads exchange the result."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks, ranks, ALONE)

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def outcome(self, step: int) -> bool:
        error: Exception | None = None
        try:
            self.thread.wait()
        except Exception as raised:
            error = raised
        answer = json.dumps([self._pop_outcome(), "" if error is None else named(error)])
        stands, failure = json.loads(self.ranks.gather_texts(answer)[0])
        if error is not None:
            raise error
        if failure:
            raise PeerLost(f"the checkpoint of step {step} failed on rank 0: {failure}")
        return bool(stands)

    def close(self, *, failed: bool) -> None:
        self.thread.wait()


# --- newest --------------------------------------------------------------------------------------
# Loading: all ranks together find and verify the newest checkpoint whose digests hold.
#
# Every rank decides from the same exchanged texts, so that all load the same checkpoint. The engine
# defines how tensors are read (`read`), and how a training loads them (`take`).
#
# A digest shows that a file is as it was written, not that its state is valid. If a state cannot be
# read or loaded, the checkpoint counts as bad, and the one before is tried.


NOT_AS_EXPECTED = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
    OverflowError,
)
Read = Callable[[Path, Manifest], Any]


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint; `rank_state` is None if another number of ranks saved it."""

    step: int
    path: Path
    manifest: Manifest
    common: Any
    rank_state: Any


@dataclass(frozen=True)
class Search:
    """The search of one rank. Bad checkpoints in `own_folder` may be renamed.

    `read(folder, manifest)` reads a verified checkpoint; it raises `BadCheckpoint` if that differs
    from its manifest. `take(loaded)` loads the state that was read, on all ranks.
    """

    ranks: Ranks
    own_folder: Path
    read: Callable[[Path, Manifest], Loaded]
    report: Callable[..., None]
    take: Callable[[Loaded], None] = nothing
    joins: bool = False
    """Whether this rank raises `ProgramError` where it has a problem: the others do not need it."""

    def newest(self, sources: list[Path]) -> Loaded | None:
        """The first candidate that all ranks can verify and load; every rank calls this.

        If a verified one cannot be loaded, the program may be at fault: it is renamed only if an
        older one can be loaded. Raises `RequestError` if none can, because the training then holds
        the state of no checkpoint.
        """
        listed = json.dumps([str(path) for source in sources for path in candidates(source)])
        unfit: list[tuple[Path, list[str]]] = []
        for name in json.loads(self.ranks.gather_texts(listed)[0]):
            loaded, problems = self._try(Path(name))
            if loaded is None:
                self._skip(Path(name), problems)
                continue
            problems = self._load_problems(loaded)
            if not problems:
                for folder, problems_before in unfit:
                    self._skip(folder, problems_before)
                return loaded
            unfit.append((Path(name), problems))
        if unfit:
            raise _none_fits(*unfit[0])
        return None

    def _load_problems(self, loaded: Loaded) -> list[str]:
        """Load it; returns the problems of all ranks with that."""
        if self.take is nothing:
            return []
        problems = []
        try:
            self.take(loaded)
        except (AllranksError, OSError, MemoryError):
            raise
        except Exception as error:
            problems = [f"its state cannot be loaded: {named(error)}"]
        return self._agreed(problems, "")

    def _try(self, folder: Path) -> tuple[Loaded | None, list[str]]:
        problems: list[str] = []
        manifest, sealed = None, ""
        try:
            manifest = read_manifest(folder)
            sealed = digest_of(seal(manifest))
            problems = verify_files(folder, manifest, self._share(manifest))
        except BadCheckpoint as error:
            problems = [str(error)]
        problems = self._agreed(problems, sealed)
        loaded = None
        if not problems and manifest is not None:
            try:
                loaded = read_as(self.read, folder, manifest)
            except BadCheckpoint as error:
                problems = [str(error)]
            problems = self._agreed(problems, sealed)
        return (None if problems else loaded), problems

    def _agreed(self, problems: list[str], sealed: str) -> list[str]:
        """The problems of all ranks, each once; also checks that all read the same manifest."""
        if problems and self.joins:
            raise ProgramError("; ".join(problems))
        answers = [json.loads(t) for t in self.ranks.gather_texts(json.dumps([problems, sealed]))]
        merged = list(dict.fromkeys(problem for each, _ in answers for problem in each))
        if not merged and len({manifest for _, manifest in answers}) > 1:
            return [f"{NAME} is not the same for all ranks: is the storage shared?"]
        return merged

    def _share(self, manifest: Manifest) -> list[str]:
        """The files that this rank verifies: balanced by bytes, the largest first."""
        loads = [0] * self.ranks.size
        mine = []
        for name in sorted(manifest.files, key=lambda n: (-manifest.files[n].bytes, n)):
            rank = loads.index(min(loads))
            loads[rank] += manifest.files[name].bytes
            if rank == self.ranks.rank:
                mine.append(name)
        return mine

    def _skip(self, folder: Path, problems: list[str]) -> None:
        if self.ranks.rank != 0:
            return
        is_own = folder.parent.resolve() == self.own_folder.resolve()
        step = checkpoint_folder.step_of(folder)
        aside = None
        if is_own and step >= 0 and folder.is_dir():
            aside = str(checkpoint_folder.set_aside(folder))
        self.report(
            "checkpoint_skipped", step=step, path=str(folder), problems=problems, set_aside=aside
        )


def _none_fits(folder: Path, problems: list[str]) -> RequestError:
    return RequestError(
        asked=f"to resume from {folder}",
        found="; ".join(problems),
        why="its digests hold, so it is as it was written: by another version, or for a program "
        "that has changed since; and no older checkpoint can be loaded",
        do="resume with the version and the program that wrote it, or start anew in another folder",
    )


def read_as(read: Read, folder: Path, manifest: Manifest) -> Any:
    """Call `read` on a checkpoint; raises `BadCheckpoint` if its state is not valid."""
    try:
        return read(folder, manifest)
    except NOT_AS_EXPECTED as error:
        raise BadCheckpoint(f"{NAME}: its state cannot be read: {named(error)}") from error


def values_of(manifest: Manifest) -> tuple[Any, list[Any]]:
    """The values that all ranks hold, and those of each rank; raises `BadCheckpoint`."""
    try:
        common, rank_states = manifest.values["common"], manifest.values["own"]
        assert len(rank_states) == manifest.ranks
    except (TypeError, KeyError, AssertionError):
        raise BadCheckpoint(f"{NAME}: its values are not those of a state") from None
    return common, rank_states


def is_below(path: str, prefix: str) -> bool:
    """Whether a path is `prefix`, or below it."""
    return path == prefix or path.startswith(f"{prefix}/")
