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
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.files import as_json, fsync_folder
from allranks.checkpoint.folder import BLOCK_BYTES
from allranks.checkpoint.format import (
    DIGEST_BYTES,
    FileLayout,
    Manifest,
    Reach,
    SavedFile,
    SavedTensor,
    nothing,
    rank_file,
    step_folder,
    write_manifest,
)

# --- writing -------------------------------------------------------------------------------------
# Writes a snapshot to its file: once, whole and synced, or not at all.


Tell = Callable[[str], None]


def write_file(
    path: Path, layout: FileLayout, data: memoryview, reach: Tell = nothing
) -> SavedFile:
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
    def layout(self) -> FileLayout: ...

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
class Planned:
    """The part of a state that one rank writes: `take` copies its tensors into the `snapshot`.

    `common` and `rank_state` are the values without their tensors. `tensors(files)` gives the place
    of every tensor in the files of the ranks that write, in rank order.
    """

    common: Any
    rank_state: Any
    tensors: Callable[[list[str]], dict[str, SavedTensor]]
    snapshot: TensorSnapshot
    take: Callable[[], None] = nothing


@dataclass(frozen=True)
class Save:
    """One save after its snapshot. If there is no snapshot, `failed` says why.

    `ranks` is the number of ranks of the job; not all of them need to write. `about` returns the
    leader's further fields; `begun` and `stall_s` are for the report.
    """

    step: int
    ranks: int
    planned: Planned
    about: Callable[[], dict[str, Any]]
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
        self._about: dict[str, Any] = {}

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
        answer: dict[str, Any] = {"error": self.save.failed, "own": self.save.planned.rank_state}
        try:
            if not self.save.failed:
                self._about = self.save.about() if self.is_leader else {}
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
        snapshot = self.save.planned.snapshot
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
            tensors=self.save.planned.tensors(names),
            values={"common": self.save.planned.common, "own": rank_states},
            **self._about,
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
