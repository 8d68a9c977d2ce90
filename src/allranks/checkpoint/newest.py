"""Loading: the newest checkpoint whose digests hold, found and verified by all ranks together.

Every decision is taken on every rank from the same exchanged words, so that no rank ever loads
another checkpoint than the others. How the tensors are read is the engine's (`read`), and how a
training goes on from them (`take`).

A digest says that a file is as it was written, not that the state in it is one: what fails while a
state is read or taken up is a checkpoint that does not hold, and the one before is tried.
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
    """A checkpoint that was loaded; `own` is None if another number of ranks saved it."""

    step: int
    path: Path
    manifest: Manifest
    common: Any
    own: Any


@dataclass(frozen=True)
class Search:
    """Looks for one rank. `own_folder` is where bad checkpoints may be set aside.

    `read(folder, manifest)` loads one whose digests hold; it raises `BadCheckpoint` for one that
    is not what its manifest says. `take(loaded)` goes on from what was read, on all ranks.
    """

    ranks: Ranks
    own_folder: Path
    read: Callable[[Path, Manifest], Loaded]
    report: Callable[..., None]
    take: Callable[[Loaded], None] = nothing

    def newest(self, sources: list[Path]) -> Loaded | None:
        """The first candidate that all ranks find whole and go on from; every rank calls this.

        One that is whole and cannot be taken up may be the program's fault: it is set aside only
        where an older one can be. Raises `RequestError` where none can, for what the training
        holds by then is of no checkpoint.
        """
        listed = json.dumps([str(path) for source in sources for path in candidates(source)])
        unfit: list[tuple[Path, list[str]]] = []
        for name in json.loads(self.ranks.gather_texts(listed)[0]):
            loaded, problems = self._try(Path(name))
            if loaded is None:
                self._skip(Path(name), problems)
                continue
            problems = self._taken_up(loaded)
            if not problems:
                for folder, found in unfit:
                    self._skip(folder, found)
                return loaded
            unfit.append((Path(name), problems))
        if unfit:
            raise _none_fits(*unfit[0])
        return None

    def _taken_up(self, loaded: Loaded) -> list[str]:
        """Go on from it; what went wrong with that on any rank."""
        if self.take is nothing:
            return []
        problems = []
        try:
            self.take(loaded)
        except (AllranksError, OSError, MemoryError):
            raise
        except Exception as error:
            problems = [f"its state cannot be taken up: {named(error)}"]
        return self._agreed(problems, "")

    def _try(self, folder: Path) -> tuple[Loaded | None, list[str]]:
        problems: list[str] = []
        manifest, seen = None, ""
        try:
            manifest = read_manifest(folder)
            seen = digest_of(seal(manifest))
            problems = verify_files(folder, manifest, self._share(manifest))
        except BadCheckpoint as error:
            problems = [str(error)]
        problems = self._agreed(problems, seen)
        loaded = None
        if not problems and manifest is not None:
            try:
                loaded = read_as(self.read, folder, manifest)
            except BadCheckpoint as error:
                problems = [str(error)]
            problems = self._agreed(problems, seen)
        return (None if problems else loaded), problems

    def _agreed(self, problems: list[str], seen: str) -> list[str]:
        """What any rank found, each thing once; and whether all look at the same manifest."""
        told = [json.loads(t) for t in self.ranks.gather_texts(json.dumps([problems, seen]))]
        found = list(dict.fromkeys(problem for said, _ in told for problem in said))
        if not found and len({manifest for _, manifest in told}) > 1:
            return [f"{NAME} is not the same for all ranks: is the storage shared?"]
        return found

    def _share(self, manifest: Manifest) -> list[str]:
        """The files that this rank verifies: shared out by bytes, the largest first."""
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
        own = folder.parent.resolve() == self.own_folder.resolve()
        step = checkpoint_folder.step_of(folder)
        aside = None
        if own and step >= 0 and folder.is_dir():
            aside = str(checkpoint_folder.set_aside(folder))
        self.report(
            "checkpoint_skipped", step=step, path=str(folder), problems=problems, set_aside=aside
        )


def _none_fits(folder: Path, problems: list[str]) -> RequestError:
    return RequestError(
        asked=f"to resume from {folder}",
        found="; ".join(problems),
        why="its digests hold, so it is as it was written: by another version, or for a program "
        "that is another one by now; and no older checkpoint can be taken up",
        do="resume with the version and the program that wrote it, or start anew in another folder",
    )


def read_as(read: Read, folder: Path, manifest: Manifest) -> Any:
    """What `read` makes of a checkpoint; raises `BadCheckpoint` where it is no such state."""
    try:
        return read(folder, manifest)
    except NOT_AS_EXPECTED as error:
        raise BadCheckpoint(f"{NAME}: its state cannot be read: {named(error)}") from error


def values_of(manifest: Manifest) -> tuple[Any, list[Any]]:
    """The values that all ranks hold, and those of each rank; raises `BadCheckpoint`."""
    try:
        common, own = manifest.values["common"], manifest.values["own"]
        assert len(own) == manifest.ranks
    except (TypeError, KeyError, AssertionError):
        raise BadCheckpoint(f"{NAME}: its values are not those of a state") from None
    return common, own


def is_below(path: str, prefix: str) -> bool:
    """Whether a path is `prefix`, or one of what lies in it."""
    return path == prefix or path.startswith(f"{prefix}/")
