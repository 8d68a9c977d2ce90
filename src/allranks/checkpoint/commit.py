"""The commit of one checkpoint: what the thread of each writing rank does after the snapshot.

Every rank writes its file. One exchange tells all how each fared: if all did well the leader writes
the manifest, and a second exchange tells that it stands. If any could not write (a full disk),
every rank takes its file back, the last good checkpoint stays, and training goes on.

An engine whose ranks all hold the same lets its leader write alone (`ALONE`): then nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.files import as_json, fsync_folder
from allranks.checkpoint.folder import BLOCK_BYTES
from allranks.checkpoint.format import (
    DIGEST_BYTES,
    Manifest,
    Reach,
    SavedFile,
    SavedTensor,
    nothing,
    rank_file,
    step_folder,
    write_manifest,
)
from allranks.checkpoint.tensor_file import Layout
from allranks.errors import PeerLost

# --- writing -------------------------------------------------------------------------------------
# The file that a snapshot becomes: written once, whole and lasting, or not there.


Tell = Callable[[str], None]


def write_file(path: Path, layout: Layout, data: memoryview, reach: Tell = nothing) -> SavedFile:
    """Write a new file, whole and lasting when this returns; raises OSError, and then it is gone.

    All of its room is taken before the first byte is written: a full disk shows at once.
    """
    total = len(layout.header) + layout.data_bytes
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, total)
        digest = _write(fd, memoryview(layout.header), data, reach)
        reach("save:fsync")
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return SavedFile(total, digest)


def _write(fd: int, header: memoryview, data: memoryview, reach: Tell) -> str:
    running = blake2b(digest_size=DIGEST_BYTES)
    half = len(data) // 2
    _write_all(fd, header, running)
    _write_all(fd, data[:half], running)
    reach("save:half")
    _write_all(fd, data[half:], running)
    return running.hexdigest()


def _write_all(fd: int, data: memoryview, running: blake2b) -> None:
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        running.update(block)
        while block:
            block = block[os.write(fd, block) :]


class Ranks(Protocol):
    """Ranks that tell each other texts, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_texts(self, text: str) -> list[str]:
        """What each rank says here, in rank order; every rank calls it."""
        ...


@dataclass(frozen=True)
class Alone:
    """One rank that has nobody to tell."""

    rank: int = 0
    size: int = 1

    def gather_texts(self, text: str) -> list[str]:
        return [text]


ALONE = Alone()


class TensorSnapshot(Protocol):
    """Copies of tensors as their file will hold them: its layout, and the bytes after it."""

    @property
    def layout(self) -> Layout: ...

    @property
    def data(self) -> memoryview: ...


@dataclass(frozen=True)
class Rules:
    """Where the checkpoints of a run lie, which are kept, and who is told what happens."""

    folder: Path
    keep: int
    best: str
    attempt: int
    reach: Reach
    report: Callable[..., None]


@dataclass(frozen=True)
class Save:
    """One save after its snapshot. `failed` says why there is none, if there is none.

    `ranks` are those of the job; not all of them need to write. `tensors(files)` says where every
    tensor lies in the files of those that do, in rank order. `common` and `own` are the values
    beside the tensors; `about` is what the manifest says beside the state; `begun` and `stall_s`
    are for the report.
    """

    step: int
    ranks: int
    tensors: Callable[[list[str]], dict[str, SavedTensor]]
    snapshot: TensorSnapshot
    common: Any
    own: Any
    about: dict[str, Any]
    begun: float
    stall_s: float
    failed: str


class Commit:
    """Carries out one save on one rank, over a communicator that nobody else uses meanwhile."""

    def __init__(self, rules: Rules, comm: Ranks, save: Save) -> None:
        self.rules, self.comm, self.save = rules, comm, save
        self.folder = step_folder(rules.folder, save.step)
        self.path = self.folder / rank_file(comm.rank, save.ranks, rules.attempt)
        self.is_leader = comm.rank == 0
        self._wrote = False

    def run(self) -> bool:
        """Whether the checkpoint stands: the same answer on all ranks. Raises `PeerLost`."""
        told = [json.loads(text) for text in self.comm.gather_texts(self._write())]
        errors = [(rank, said["error"]) for rank, said in enumerate(told) if said["error"]]
        if not errors:
            outcome = self.comm.gather_texts(self._commit(told) if self.is_leader else "")[0]
            errors = [(0, outcome)] if outcome else []
        if errors:
            self._take_back(*errors[0])
        elif self.is_leader:
            self._after("save:prune", self._prune)
        return not errors

    def _write(self) -> str:
        """Write this rank's file; what it has to say to the others, as JSON."""
        said: dict[str, Any] = {"error": self.save.failed, "own": self.save.own}
        try:
            if not self.save.failed:
                file = self._write_file()
                said |= {"bytes": file.bytes, "blake2b": file.blake2b}
        except Exception as error:
            said["error"] = named(error)
        return as_json(said)

    def _write_file(self) -> SavedFile:
        def reach(point: str) -> None:
            self.rules.reach(point, self.save.step)

        reach("save:write")
        self.folder.mkdir(parents=True, exist_ok=True)
        snapshot = self.save.snapshot
        file = write_file(self.path, snapshot.layout, snapshot.data, reach)
        self._wrote = True
        fsync_folder(self.folder)
        reach("save:written")
        return file

    def _commit(self, told: list[dict[str, Any]]) -> str:
        """Leader: write the manifest. Returns why it could not be written, or nothing."""
        ranks = self.save.ranks
        names = [rank_file(r, ranks, self.rules.attempt) for r in range(self.comm.size)]
        files = {n: SavedFile(s["bytes"], s["blake2b"]) for n, s in zip(names, told, strict=True)}
        own = [said["own"] for said in told] + [None] * (ranks - len(told))
        manifest = Manifest(
            step=self.save.step,
            created=time.time(),
            ranks=ranks,
            files=files,
            tensors=self.save.tensors(names),
            values={"common": self.save.common, "own": own},
            **self.save.about,
        )
        try:
            fsync_folder(self.rules.folder.parent)  # the first save has made `checkpoints` there
            fsync_folder(self.rules.folder)
            write_manifest(self.folder, manifest, self.rules.reach)
        except Exception as error:
            return named(error)
        self._after("save:committed", lambda: self._tell(manifest))
        return ""

    def _tell(self, manifest: Manifest) -> None:
        self.rules.report(
            "checkpoint",
            step=manifest.step,
            path=str(self.folder),
            bytes=manifest.bytes,
            stall_s=self.save.stall_s,
            seconds=time.monotonic() - self.save.begun,
        )
        checkpoint_folder.remove_unnamed(self.folder, manifest)

    def _prune(self) -> None:
        checkpoint_folder.prune(self.rules.folder, self.rules.keep, self.rules.best)

    def _after(self, point: str, act: Callable[[], None]) -> None:
        """The leader's work after a commit: a failure is reported, and the checkpoint stands."""
        try:
            self.rules.reach(point, self.save.step)
            act()
        except OSError as error:
            self.rules.report("checkpoints_not_pruned", step=self.save.step, error=named(error))

    def _take_back(self, rank: int, error: str) -> None:
        """Nobody commits: this rank's file goes, and the folder with the last of them."""
        with contextlib.suppress(OSError):  # what cannot be removed has no manifest, and is swept
            if self._wrote:
                self.path.unlink(missing_ok=True)
            self.folder.rmdir()
        if self.is_leader:
            self.rules.report("checkpoint_failed", step=self.save.step, rank=rank, error=error)


def named(error: BaseException) -> str:
    """What an error says; its type if it says nothing."""
    return str(error) or type(error).__name__


# --- writers -------------------------------------------------------------------------------------
# Who writes a checkpoint while training goes on: a thread of every rank, or one of the leader's.
#
# Where every rank writes its part (`EveryRank`), their threads exchange texts over a communicator
# of their own. Where all ranks hold the same (`LeaderAlone`), the leader's thread writes for all
# and sends nothing; the ranks hear how it fared from the thread that trains, when they wait.


class BackgroundThread:
    """Does one thing at a time beside the training; nothing that it raises is lost."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Begin `act` in a thread. The one before it is over: `wait` has returned."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._guarded, args=(act,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when it is over; raises what it raised, once."""
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
    """Those of `ranks`, which train together, that write a checkpoint; seen from one of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.thread = ranks, BackgroundThread()
        self._stands = False

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this rank does."""

    @abstractmethod
    def ready(self, sweep: Callable[[], object]) -> Ranks:
        """The rank that plans a save and finds a checkpoint; its first call calls `sweep`."""

    @abstractmethod
    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        """Start `commit` in the thread, for those that write; it says whether the save stands."""

    @abstractmethod
    def outcome(self, step: int) -> bool:
        """Whether the save of `step` is committed; every rank waits here, and hears the same.

        Raises what the thread raised, and `PeerLost` where another rank's did.
        """

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Wait for the thread, unless it may wait for others that this rank has `failed`.

        Raises what the thread raised.
        """

    def leave(self, *, failed: bool) -> None:
        """Give back what `ready` has made."""

    def _run(self, commit: Callable[[Ranks], bool], ranks: Ranks) -> None:
        def act() -> None:
            self._stands = commit(ranks)

        self.thread.start(act)

    def _taken(self) -> bool:
        """What the thread has found, once."""
        stands, self._stands = self._stands, False
        return stands


class Sides(Ranks, Protocol):
    """Ranks that can have a second communicator beside the one that trains."""

    def aside(self) -> Self:
        """The same ranks once more; every rank calls this."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...

    def leave(self, *, failed: bool = False) -> None:
        """Leave the others."""
        ...


class EveryRank(Writers):
    """Each rank writes its part; their threads tell each other how it went."""

    writes = True

    def __init__(self, ranks: Sides) -> None:
        super().__init__(ranks)
        self._training = ranks
        self._aside: Sides | None = None

    def ready(self, sweep: Callable[[], object]) -> Ranks:
        if self._aside is None:
            aside = self._training.aside()
            if aside.rank == 0:
                sweep()
            aside.barrier()
            self._aside = aside
        return self._aside

    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        assert self._aside is not None
        self._run(commit, self._aside)

    def outcome(self, step: int) -> bool:
        self.thread.wait()
        return self._taken()

    def close(self, *, failed: bool) -> None:
        if not failed or self._training.size == 1:
            self.thread.wait()

    def leave(self, *, failed: bool) -> None:
        if self._aside is not None:
            self._aside.leave(failed=failed)
            self._aside = None


class LeaderAlone(Writers):
    """The leader writes what all ranks hold; they tell each other texts where they train."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._is_swept = False

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def ready(self, sweep: Callable[[], object]) -> Ranks:
        if self.writes and not self._is_swept:
            sweep()  # nobody looks before the leader has: a search begins with its list
            self._is_swept = True
        return self.ranks

    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        self._run(commit, ALONE)

    def outcome(self, step: int) -> bool:
        error: Exception | None = None
        try:
            self.thread.wait()
        except Exception as raised:
            error = raised
        said = json.dumps([self._taken(), "" if error is None else named(error)])
        stands, failure = json.loads(self.ranks.gather_texts(said)[0])
        if error is not None:
            raise error
        if failure:
            raise PeerLost(f"the checkpoint of step {step} failed on rank 0: {failure}")
        return bool(stands)

    def close(self, *, failed: bool) -> None:
        self.thread.wait()
