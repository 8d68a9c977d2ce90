"""The commit of one checkpoint, in the thread of each writing rank, after the snapshot.

Every rank writes its file. The ranks gather their results: if all succeeded, the leader writes the
manifest, and a second exchange confirms it. If any rank could not write (a full disk), every rank
removes its file, the last good checkpoint remains, and training goes on.

If all ranks of an engine hold the same state, only its leader writes (`ALONE`), without exchange.
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
# Writes a snapshot to its file: once, whole and synced, or not at all.


Tell = Callable[[str], None]


def write_file(path: Path, layout: Layout, data: memoryview, reach: Tell = nothing) -> SavedFile:
    """Write a new file, which is whole and synced at the return; raises OSError, and removes it.

    All of its space is allocated before the first byte is written: a full disk fails at once.
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
    """Ranks that exchange texts, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_texts(self, text: str) -> list[str]:
        """The text of each rank, in rank order; every rank calls it."""
        ...


@dataclass(frozen=True)
class Alone:
    """A single rank, without others."""

    rank: int = 0
    size: int = 1

    def gather_texts(self, text: str) -> list[str]:
        return [text]


ALONE = Alone()


class TensorSnapshot(Protocol):
    """Copies of tensors in the form of their file: its layout, and the bytes after it."""

    @property
    def layout(self) -> Layout: ...

    @property
    def data(self) -> memoryview: ...


@dataclass(frozen=True)
class Rules:
    """The folder of a run's checkpoints, the rule which remain, and the callback for reports."""

    folder: Path
    keep: int
    best: str
    attempt: int
    reach: Reach
    report: Callable[..., None]


@dataclass(frozen=True)
class Save:
    """One save after its snapshot. If there is no snapshot, `failed` says why.

    `ranks` is the number of ranks of the job; not all of them need to write. `tensors(files)` gives
    the place of every tensor in the files of those that do, in rank order. `common` and
    `rank_state` are the values without their tensors; `about` are further fields of the manifest;
    `begun` and `stall_s` are for the report.
    """

    step: int
    ranks: int
    tensors: Callable[[list[str]], dict[str, SavedTensor]]
    snapshot: TensorSnapshot
    common: Any
    rank_state: Any
    about: dict[str, Any]
    begun: float
    stall_s: float
    failed: str


class Commit:
    """Carries out one save on one rank, over a communicator that nothing else uses meanwhile."""

    def __init__(self, rules: Rules, comm: Ranks, save: Save) -> None:
        self.rules, self.comm, self.save = rules, comm, save
        self.folder = step_folder(rules.folder, save.step)
        self.path = self.folder / rank_file(comm.rank, save.ranks, rules.attempt)
        self.is_leader = comm.rank == 0
        self._wrote = False

    def run(self) -> bool:
        """Write and commit; returns whether it is committed, equal on all ranks. Or `PeerLost`."""
        answers = [json.loads(text) for text in self.comm.gather_texts(self._write())]
        errors = [(rank, answer["error"]) for rank, answer in enumerate(answers) if answer["error"]]
        if not errors:
            outcome = self.comm.gather_texts(self._commit(answers) if self.is_leader else "")[0]
            errors = [(0, outcome)] if outcome else []
        if errors:
            self._take_back(*errors[0])
        elif self.is_leader:
            self._after("save:prune", self._prune)
        return not errors

    def _write(self) -> str:
        """Write this rank's file; returns the result for the other ranks, as JSON."""
        answer: dict[str, Any] = {"error": self.save.failed, "own": self.save.rank_state}
        try:
            if not self.save.failed:
                file = self._write_file()
                answer |= {"bytes": file.bytes, "blake2b": file.blake2b}
        except Exception as error:
            answer["error"] = named(error)
        return as_json(answer)

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

    def _commit(self, rows: list[dict[str, Any]]) -> str:
        """Leader: write the manifest. Returns why it could not be written, or nothing."""
        ranks = self.save.ranks
        names = [rank_file(r, ranks, self.rules.attempt) for r in range(self.comm.size)]
        files = {n: SavedFile(s["bytes"], s["blake2b"]) for n, s in zip(names, rows, strict=True)}
        rank_states = [answer["own"] for answer in rows] + [None] * (ranks - len(rows))
        manifest = Manifest(
            step=self.save.step,
            created=time.time(),
            ranks=ranks,
            files=files,
            tensors=self.save.tensors(names),
            values={"common": self.save.common, "own": rank_states},
            **self.save.about,
        )
        try:
            fsync_folder(self.rules.folder.parent)  # the first save has made `checkpoints` there
            fsync_folder(self.rules.folder)
            write_manifest(self.folder, manifest, self.rules.reach)
        except Exception as error:
            return named(error)
        self._after("save:committed", lambda: self._report_commit(manifest))
        return ""

    def _report_commit(self, manifest: Manifest) -> None:
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
        """The leader's work after a commit: a failure is reported, and the checkpoint remains."""
        try:
            self.rules.reach(point, self.save.step)
            act()
        except OSError as error:
            self.rules.report("checkpoints_not_pruned", step=self.save.step, error=named(error))

    def _take_back(self, rank: int, error: str) -> None:
        """Undo a save that failed: remove this rank's file, and the folder if it is empty."""
        with contextlib.suppress(OSError):  # what remains has no manifest, and is swept later
            if self._wrote:
                self.path.unlink(missing_ok=True)
            self.folder.rmdir()
        if self.is_leader:
            self.rules.report("checkpoint_failed", step=self.save.step, rank=rank, error=error)


def named(error: BaseException) -> str:
    """The message of an error; its type if there is none."""
    return str(error) or type(error).__name__


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
    """The writing part of `ranks`, which train together, as one of them sees it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.thread = ranks, BackgroundThread()
        self._stands = False

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this rank writes."""

    @abstractmethod
    def ready(self, sweep: Callable[[], object]) -> Ranks:
        """The ranks that plan a save and find a checkpoint; the first call calls `sweep`."""

    @abstractmethod
    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        """Start `commit` in the thread of a writing rank; it returns whether the save succeeded."""

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
        """Release what `ready` has created."""

    def _run(self, commit: Callable[[Ranks], bool], ranks: Ranks) -> None:
        def act() -> None:
            self._stands = commit(ranks)

        self.thread.start(act)

    def _pop_outcome(self) -> bool:
        """The result of the thread, once."""
        stands, self._stands = self._stands, False
        return stands


class Sides(Ranks, Protocol):
    """Ranks that can have a second communicator in addition to the one that trains."""

    def aside(self) -> Self:
        """A second communicator of the same ranks; every rank calls this."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...

    def leave(self, *, failed: bool = False) -> None:
        """Leave the others."""
        ...


class EveryRank(Writers):
    """Each rank writes its part; their threads exchange the results."""

    writes = True

    def __init__(self, ranks: Sides) -> None:
        super().__init__(ranks)
        self._training = ranks
        self._second: Sides | None = None

    def ready(self, sweep: Callable[[], object]) -> Ranks:
        if self._second is None:
            aside = self._training.aside()
            if aside.rank == 0:
                sweep()
            aside.barrier()
            self._second = aside
        return self._second

    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        assert self._second is not None
        self._run(commit, self._second)

    def outcome(self, step: int) -> bool:
        self.thread.wait()
        return self._pop_outcome()

    def close(self, *, failed: bool) -> None:
        if not failed or self._training.size == 1:
            self.thread.wait()

    def leave(self, *, failed: bool) -> None:
        if self._second is not None:
            self._second.leave(failed=failed)
            self._second = None


class LeaderAlone(Writers):
    """The leader writes the state of all ranks; the training threads exchange the result."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._is_swept = False

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def ready(self, sweep: Callable[[], object]) -> Ranks:
        if self.writes and not self._is_swept:
            sweep()  # before any rank searches: a search begins with the leader's list
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
        answer = json.dumps([self._pop_outcome(), "" if error is None else named(error)])
        stands, failure = json.loads(self.ranks.gather_texts(answer)[0])
        if error is not None:
            raise error
        if failure:
            raise PeerLost(f"the checkpoint of step {step} failed on rank 0: {failure}")
        return bool(stands)

    def close(self, *, failed: bool) -> None:
        self.thread.wait()
