"""The commit of one checkpoint: what the thread of each writing rank does after the snapshot.

Every rank writes its file. One exchange tells all how each fared: if all did well the leader writes
the manifest, and a second exchange tells that it stands. If any could not write (a full disk),
every rank takes its file back, the last good checkpoint stays, and training goes on.

An engine whose ranks all hold the same lets its leader write alone (`ALONE`): then nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.files import as_json, fsync_folder
from allranks.checkpoint.manifest import (
    Manifest,
    Reach,
    SavedFile,
    SavedTensor,
    rank_file,
    step_folder,
    write_manifest,
)
from allranks.checkpoint.tensor_file import Layout
from allranks.checkpoint.writing import write_file


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


class Snapshot(Protocol):
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
    snapshot: Snapshot
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
