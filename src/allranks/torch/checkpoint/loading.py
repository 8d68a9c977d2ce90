"""Which tensors of a checkpoint a rank reads, and into what: its own, and those that all hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from allranks.checkpoint.format import Manifest, SavedTensor, unflatten
from allranks.checkpoint.newest import Loaded, is_below, values_of
from allranks.errors import RequestError
from allranks.torch.checkpoint.plan import SHARD, WHOLE, Part, Read, holds, is_in_runs, runs_of
from allranks.torch.checkpoint.storage import read_files
from allranks.torch.checkpoint.tree import DTYPES, NAMES

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


# --- dcp -----------------------------------------------------------------------------------------
# Plans of states with DTensors, by the planner of torch.distributed.checkpoint.
#
# Loaded only for such a state (`plan`): importing it takes a second, which no launch should pay
# that holds its weights whole. Only plans are made here; nothing of it reads, writes or pickles.
#
# That planner knows of one box of each tensor on a rank. Where a rank has several runs of rows, as
# of query, key and value in one weight, each run is a part by itself.


KINDS = {WHOLE: WriteItemType.TENSOR, SHARD: WriteItemType.SHARD}


def local_parts(tensors: dict[str, Tensor]) -> dict[Part, Tensor]:
    """What this rank holds, part by part."""
    in_runs = {path: tensor for path, tensor in tensors.items() if is_in_runs(tensor)}
    planner = _save_planner({path: t for path, t in tensors.items() if path not in in_runs})
    found: dict[Part, Any] = {
        _part(item): planner.resolve_data(item) for item in planner.create_local_plan().items
    }
    for path, tensor in in_runs.items():
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        for run in runs_of(tensor):
            found[Part(path, dtype, shape, run.offsets, tuple(run.held.shape), SHARD)] = run.held
    return {part: tensor.detach() for part, tensor in found.items()}


def global_parts(ranks: list[list[Part]]) -> list[list[Part]]:
    """Of what all ranks hold, what each of them writes. The same on every rank."""
    plans = [SavePlan([_item(part) for part in parts]) for parts in ranks]
    finished, _ = _save_planner({}).create_global_plan(plans)
    return [[_part(item) for item in plan.items] for plan in finished]


def reads(saved: dict[str, SavedTensor], targets: dict[str, Tensor]) -> list[Read]:
    """The reads that fill `targets`, each from one chunk."""
    in_runs = {path: target for path, target in targets.items() if is_in_runs(target)}
    found = [
        Read(path, chunk, *overlap)
        for path, target in in_runs.items()
        for chunk in filter(holds, saved[path].chunks)
        for run in runs_of(target)
        if (overlap := run.overlap(chunk.offsets, chunk.sizes)) is not None
    ]
    targets = {path: target for path, target in targets.items() if path not in in_runs}
    metadata = Metadata({path: _metadata(saved[path]) for path in targets})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata)
    for item in planner.create_local_plan().items:
        path, at = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        chunk = next(c for c in saved[path].chunks if c.offsets == at and holds(c))
        lengths = zip(item.storage_offsets, item.lengths, strict=True)
        part = tuple(slice(start, start + length) for start, length in lengths)
        found.append(Read(path, chunk, part, planner.resolve_tensor(item)))
    return found


def _save_planner(tensors: dict[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def _part(item: WriteItem) -> Part:
    data = item.tensor_data
    assert data is not None, "tree.flatten lets tensors through, and nothing else"
    kind = next(name for name, value in KINDS.items() if value == item.type)
    dtype = NAMES[data.properties.dtype]
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return Part(item.index.fqn, dtype, tuple(data.size), offsets, sizes, kind)


def _item(part: Part) -> WriteItem:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
        TensorProperties(dtype=DTYPES[part.dtype]),
        torch.Size(part.shape),
    )
    index = MetadataIndex(part.path, list(part.offsets))
    return WriteItem(index, KINDS[part.kind], tensor_data=data)


def _metadata(tensor: SavedTensor) -> TensorStorageMetadata:
    boxes: list[Any] = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in tensor.chunks
        if holds(chunk)
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), boxes
    )
