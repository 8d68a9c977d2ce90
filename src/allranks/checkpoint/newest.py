"""Loading: all ranks together find and verify the newest checkpoint whose digests hold.

Every rank decides from the same exchanged texts, so that all load the same checkpoint. The engine
defines how tensors are read (`read`), and how a training loads them (`take`).

A digest shows that a file is as it was written, not that its state is valid. If a state cannot be
read or loaded, the checkpoint counts as bad, and the one before is tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint.commit import Ranks, named
from allranks.checkpoint.folder import candidates, verify_files
from allranks.checkpoint.format import (
    NAME,
    BadCheckpoint,
    Manifest,
    nothing,
    read_manifest,
    seal,
)
from allranks.checkpoint.format import digest as digest_of
from allranks.errors import AllranksError, RequestError

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
