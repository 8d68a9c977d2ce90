"""Loading: the newest checkpoint whose digests hold, found and verified by all ranks together.

Every decision is taken on every rank from the same exchanged words, so that no rank ever loads
another checkpoint than the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allranks import checkpoint_folder
from allranks.checkpoint_folder import candidates, verify_files
from allranks.errors import RequestError
from allranks.manifest import NAME, BadCheckpoint, Manifest, SavedTensor, read_manifest, seal
from allranks.manifest import digest as digest_of
from allranks.on_torch.checkpoint.storage import read_files
from allranks.on_torch.checkpoint.tree import DTYPES, unflatten
from allranks.on_torch.comm import Comm

Templates = dict[str, Tensor]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded; `own` is None if another number of ranks saved it."""

    step: int
    path: Path
    manifest: Manifest
    common: Any
    own: Any


@dataclass(frozen=True)
class Loader:
    """Loads for one rank. `own_folder` is where bad checkpoints may be set aside."""

    comm: Comm
    own_folder: Path
    templates: Templates
    report: Callable[..., None]

    def newest(self, sources: list[Path]) -> Loaded | None:
        """The first candidate that all ranks find whole; every rank calls this."""
        listed = json.dumps([str(path) for source in sources for path in candidates(source)])
        for name in json.loads(self.comm.gather_texts(listed)[0]):
            loaded, problems = self._try(Path(name))
            if loaded is not None:
                return loaded
            if self.comm.rank == 0:
                self._skip(Path(name), problems)
        return None

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
                loaded = self._read(folder, manifest)
            except BadCheckpoint as error:
                problems = [str(error)]
            problems = self._agreed(problems, seen)
        return (None if problems else loaded), problems

    def _agreed(self, problems: list[str], seen: str) -> list[str]:
        """What any rank found, each thing once; and whether all look at the same manifest."""
        told = [json.loads(t) for t in self.comm.gather_texts(json.dumps([problems, seen]))]
        found = list(dict.fromkeys(problem for said, _ in told for problem in said))
        if not found and len({manifest for _, manifest in told}) > 1:
            return [f"{NAME} is not the same for all ranks: is the storage shared?"]
        return found

    def _share(self, manifest: Manifest) -> list[str]:
        """The files that this rank verifies: shared out by bytes, the largest first."""
        loads = [0] * self.comm.size
        mine = []
        for name in sorted(manifest.files, key=lambda n: (-manifest.files[n].bytes, n)):
            rank = loads.index(min(loads))
            loads[rank] += manifest.files[name].bytes
            if rank == self.comm.rank:
                mine.append(name)
        return mine

    def _read(self, folder: Path, manifest: Manifest) -> Loaded:
        rank, values = self.comm.rank, manifest.values
        try:
            common, own = values["common"], values["own"]
            assert len(own) == manifest.ranks
        except (TypeError, KeyError, AssertionError):
            raise BadCheckpoint(f"{NAME}: its values are not those of a state") from None
        has_own = manifest.ranks == self.comm.size
        prefixes = ["common", f"own/{rank}"] if has_own else ["common"]
        wanted = {p: t for p, t in manifest.tensors.items() if any(_is_in(p, x) for x in prefixes)}
        targets = {path: self._target(folder, path, tensor) for path, tensor in wanted.items()}
        read_files(folder, wanted, targets)
        common = unflatten(common, targets)
        own = unflatten(own[rank], targets) if has_own else None
        return Loaded(manifest.step, folder, manifest, common, own)

    def _target(self, folder: Path, path: str, saved: SavedTensor) -> Tensor:
        target = self.templates.get(path)
        if target is None:
            return torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        if target.dtype != DTYPES[saved.dtype] or tuple(target.shape) != saved.shape:
            raise _does_not_fit(folder, path, f"{saved.dtype} {saved.shape}", target)
        return target.detach()

    def _skip(self, folder: Path, problems: list[str]) -> None:
        own = folder.parent.resolve() == self.own_folder.resolve()
        step = checkpoint_folder.step_of(folder)
        aside = None
        if own and step >= 0 and folder.is_dir():
            aside = str(checkpoint_folder.set_aside(folder))
        self.report(
            "checkpoint_skipped", step=step, path=str(folder), problems=problems, set_aside=aside
        )


def _is_in(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def _does_not_fit(folder: Path, path: str, saved: str, target: Tensor) -> RequestError:
    return RequestError(
        asked=f"to go on from {folder}",
        found=f"{path} is {saved} there, and {target.dtype} {tuple(target.shape)} here",
        why="weights of another shape or type are those of another model",
        do="give the model the shape that it was saved with, or start afresh",
    )
