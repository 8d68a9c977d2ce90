"""Which tensors of a checkpoint a rank reads, and into what: its own, and those that all hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allranks.checkpoint.manifest import Manifest, SavedTensor
from allranks.checkpoint.newest import Loaded, is_below, values_of
from allranks.checkpoint.tree import unflatten
from allranks.errors import RequestError
from allranks.torch.checkpoint.storage import read_files
from allranks.torch.checkpoint.tree import DTYPES

Templates = dict[str, Tensor]


@dataclass(frozen=True)
class Reader:
    """Reads for one of `ranks`; `templates` are tensors, by path, to be filled in place."""

    rank: int
    ranks: int
    templates: Templates

    def read(self, folder: Path, manifest: Manifest) -> Loaded:
        """A checkpoint whose digests hold; raises `BadCheckpoint` if it says what is not there."""
        common, own = values_of(manifest)
        has_own = manifest.ranks == self.ranks
        prefixes = ["common", f"own/{self.rank}"] if has_own else ["common"]
        wanted = {
            p: t for p, t in manifest.tensors.items() if any(is_below(p, x) for x in prefixes)
        }
        targets = {path: self._target(folder, path, tensor) for path, tensor in wanted.items()}
        read_files(folder, wanted, targets)
        mine = unflatten(own[self.rank], targets) if has_own else None
        return Loaded(manifest.step, folder, manifest, unflatten(common, targets), mine)

    def _target(self, folder: Path, path: str, saved: SavedTensor) -> Tensor:
        target = self.templates.get(path)
        if target is None:
            return torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        if target.dtype != DTYPES[saved.dtype] or tuple(target.shape) != saved.shape:
            raise _does_not_fit(folder, path, f"{saved.dtype} {saved.shape}", target)
        return target.detach()


def _does_not_fit(folder: Path, path: str, saved: str, target: Tensor) -> RequestError:
    return RequestError(
        asked=f"to resume from {folder}",
        found=f"{path} is {saved} there, and {target.dtype} {tuple(target.shape)} here",
        why="weights of another shape or type are those of another model",
        do="give the model the shape that it was saved with, or start afresh",
    )
