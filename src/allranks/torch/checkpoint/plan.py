"""Plans which rank writes and reads which part of a checkpoint; its tensors as bytes.

Every rank plans its tensors, the plans are gathered as text, and every rank computes the same
global plan from them: a tensor that several ranks hold is written by one of them, balanced by
bytes. torch.distributed.checkpoint plans a state with DTensors, each rank its part. For whole
tensors, the plain plan here is the same, and faster.

A snapshot lies in one buffer of the host as the file will have it, so that training waits for one
copy in memory and no more; the buffer is kept from save to save.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import allranks.torch.accelerator as accelerator
from allranks.checkpoint.commit import Ranks
from allranks.checkpoint.format import (
    ITEM_BYTES,
    PAIR,
    BadCheckpoint,
    FileLayout,
    SavedTensor,
    TensorBox,
    as_written,
    lay_out,
    piece_name,
    refused,
)
from allranks.errors import RequestError
from allranks.torch.checkpoint.state import DTYPES, NAMES, is_dtensor
from allranks.torch.model.reals import reals

# --- parts ---------------------------------------------------------------------------------------
# The parts of a checkpoint's plan: what a rank writes of a tensor, and reads of a chunk.


WHOLE, SHARD, ELSEWHERE = "whole", "shard", "elsewhere"


@dataclass(frozen=True)
class WritePart:
    """What one rank writes of one tensor: `shape` is the tensor's, the box its part of it.

    A `kind` of WHOLE may be held by several ranks alike, and is written by one. What is ELSEWHERE
    is known here and held by other ranks, whole or in parts.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: str = WHOLE

    def __hash__(self) -> int:
        return hash(self.path)  # a text keeps it; few parts share one

    @property
    def whole_bytes(self) -> int:
        """The bytes of the tensor, not of the part."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Read:
    """One read: the `part` of a `chunk` that fills `target`."""

    path: str
    chunk: TensorBox
    part: tuple[slice, ...]
    target: Tensor


def holds(chunk: TensorBox) -> bool:
    """Whether it has any number: an empty chunk may lie at the offset of another one."""
    return 0 not in chunk.sizes


@dataclass(frozen=True)
class WritePlan:
    """The parts that each rank writes, in rank order. Equal on all ranks."""

    parts: tuple[tuple[WritePart, ...], ...]

    def tensors(self, files: list[str]) -> dict[str, SavedTensor]:
        """Every tensor with its chunks, for the manifest; `files` by rank."""
        chunks: dict[str, list[tuple[WritePart, TensorBox]]] = {}
        for file, parts in zip(files, self.parts, strict=True):
            for part in parts:
                chunk = TensorBox(file, part.offsets, part.sizes)
                chunks.setdefault(part.path, []).append((part, chunk))
        return {
            path: SavedTensor(pairs[0][0].dtype, pairs[0][0].shape, tuple(c for _, c in pairs))
            for path, pairs in sorted(chunks.items())
        }


class Planner:
    """Plans the saves of one rank; plans again only if the state of some rank has changed.

    Every rank calls `plan` for the same step. Each call gathers a digest; a new plan, all of it.
    """

    def __init__(self, comm: Ranks) -> None:
        self.comm = comm
        self._looks: list[Any] = []
        self._text = ""
        self._digest = ""
        self._known: list[str] = []
        self._plan = WritePlan(())

    def plan(
        self, step: int, tensors: dict[str, Tensor]
    ) -> tuple[WritePlan, dict[WritePart, Tensor]]:
        """The plan of all ranks, and the tensors that this rank writes, which are not copies."""
        parts = local_parts(tensors)
        looks = list(parts)
        if looks != self._looks:
            self._text = parts_text(looks)
            self._digest = blake2b(self._text.encode(), digest_size=16).hexdigest()
            self._looks = looks
        self._agree(step)
        return self._plan, {part: parts[part] for part in self._plan.parts[self.comm.rank]}

    def plan_again(
        self, step: int, local_tensors: dict[str, Tensor]
    ) -> tuple[WritePlan, dict[WritePart, Tensor]]:
        """The same where this rank has the parts of the last plan: `local_tensors`, by path."""
        self._agree(step)
        writes = self._plan.parts[self.comm.rank]
        return self._plan, {part: local_tensors[part.path] for part in writes}

    def has_parts(self, local_tensors: dict[str, Tensor]) -> bool:
        """Whether these tensors are the parts of the last plan, one for each path."""
        parts = [part for part in self._looks if part.kind != ELSEWHERE]
        shapes = {path: tuple(tensor.shape) for path, tensor in local_tensors.items()}
        return all(shapes.get(part.path) == part.sizes for part in parts)

    def _agree(self, step: int) -> None:
        words = [word.split() for word in self.comm.gather_texts(f"{step} {self._digest}")]
        steps = [word[0] for word in words]
        if len(set(steps)) > 1:
            raise _unlike(f"steps {', '.join(steps)}, in rank order", "the same step on every rank")
        digests = [word[-1] for word in words]
        if digests != self._known:
            texts = self.comm.gather_texts(self._text)
            ranks = [self._looks if text == self._text else read_parts(text) for text in texts]
            self._plan = global_plan(ranks)
            self._known = digests


def local_parts(tensors: dict[str, Tensor]) -> dict[WritePart, Tensor]:
    """The parts that this rank holds, and those that other ranks hold (meta tensors)."""
    if any(is_dtensor(tensor) for tensor in tensors.values()):
        present = {path: tensor for path, tensor in tensors.items() if not tensor.is_meta}
        absent = {_whole(path, t): t for path, t in tensors.items() if t.is_meta}
        return {**_dtensor_parts(present), **absent}
    return {_whole(path, tensor): tensor for path, tensor in tensors.items()}


def _whole(path: str, tensor: Tensor) -> WritePart:
    shape = tuple(tensor.shape)
    kind = ELSEWHERE if tensor.is_meta else WHOLE
    return WritePart(path, NAMES[tensor.dtype], shape, (0,) * len(shape), shape, kind)


def global_plan(ranks: list[list[WritePart]]) -> WritePlan:
    """The plan for the parts of all ranks, the same on every rank."""
    _check(ranks)
    ranks = [[part for part in parts if part.kind != ELSEWHERE] for parts in ranks]
    if all(part.kind == WHOLE for parts in ranks for part in parts):
        shared_out = _shared_out(ranks)
    else:
        shared_out = dtensor_plan(ranks)
    return WritePlan(tuple(tuple(parts) for parts in shared_out))


def parts_text(parts: Iterable[WritePart]) -> str:
    """The parts as a text for other ranks."""
    return json.dumps([[*vars(part).values()] for part in parts])


def read_parts(text: str) -> list[WritePart]:
    """The inverse of `parts_text`."""
    return [
        WritePart(path, dtype, tuple(shape), tuple(offsets), tuple(sizes), kind)
        for path, dtype, shape, offsets, sizes, kind in json.loads(text)
    ]


def _shared_out(ranks: list[list[WritePart]]) -> list[list[WritePart]]:
    """Assign each part to its holder with the fewest bytes to write, the largest part first."""
    holders: dict[WritePart, list[int]] = {}
    for rank, parts in enumerate(ranks):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    loads = [0] * len(ranks)
    chosen: list[list[WritePart]] = [[] for _ in ranks]
    for part in sorted(holders, key=lambda p: (-p.whole_bytes, p.path)):
        rank = min(holders[part], key=lambda r: (loads[r], r))
        loads[rank] += part.whole_bytes
        chosen[rank].append(part)
    return chosen


def _check(ranks: list[list[WritePart]]) -> None:
    """Check that shared parts exist on all ranks with the same looks; a planner uses any one."""
    known: dict[str, Any] = {}
    cut = {part.path for parts in ranks for part in parts if part.kind == SHARD}
    for parts in ranks:
        for part in parts:
            is_whole = part.path not in cut if part.kind == ELSEWHERE else part.kind == WHOLE
            looks = (is_whole, part.dtype, part.shape)
            if known.setdefault(part.path, looks) != looks:
                found = f"{part.path} as {known[part.path]} and as {looks}"
                raise _unlike(found, "the same on every rank")
    stored = {p.path for parts in ranks for p in parts if p.kind != ELSEWHERE}
    for path in sorted(known.keys() - stored)[:1]:
        raise refused(path, "a tensor without storage on any rank")
    shared = [{p.path for p in parts} - cut for parts in ranks]
    shared = [{path for path in paths if not path.startswith("own/")} for paths in shared]
    for rank, paths in enumerate(shared):
        for path in sorted(paths ^ shared[0])[:1]:
            raise _unlike(f"{path} on one of the ranks 0 and {rank}, and not on the other", "both")


def _unlike(found: str, wanted: str) -> RequestError:
    return RequestError(
        asked=f"a checkpoint of a state that all ranks hold: {wanted}",
        found=found,
        why="it would be written by one rank, and what the others hold would be lost",
        do="give what differs between ranks as `rank_state`",
    )


def load_plan(saved: dict[str, SavedTensor], targets: dict[str, Tensor]) -> list[Read]:
    """The reads that fill `targets`, each from one chunk; meta tensors are not read."""
    targets = {path: target for path, target in targets.items() if not target.is_meta}
    saved = {path: saved[path] for path in targets}
    if any(is_dtensor(target) for target in targets.values()):
        return _dtensor_reads(saved, targets)
    return [
        Read(path, chunk, tuple(slice(0, n) for n in chunk.sizes), _box(targets[path], chunk))
        for path, tensor in saved.items()
        for chunk in tensor.chunks
        if holds(chunk)
    ]


def _box(target: Tensor, chunk: TensorBox) -> Tensor:
    box = zip(chunk.offsets, chunk.sizes, strict=True)
    return target[tuple(slice(start, start + size) for start, size in box)]


# --- runs ----------------------------------------------------------------------------------------
# The part of a tensor that a rank holds in several runs of rows: `_StridedShard` of torch.
#
#     rows of one weight      q q q q k k k k v v v v
#     on rank 0 of 2          q q     k k     v v          three runs, side by side in its memory


Box = tuple[int, ...]


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of the whole and of this rank: their offsets in the whole, and the rows."""

    offsets: Box
    rows: Tensor

    def overlap(self, offsets: Box, sizes: Box) -> tuple[tuple[slice, ...], Tensor] | None:
        """The overlap with a box of the whole: its slices in the box, and these rows; or `None`."""
        there, here = [], []
        for offset, size, start, length in zip(
            self.offsets, self.rows.shape, offsets, sizes, strict=True
        ):
            first, last = max(offset, start), min(offset + size, start + length)
            if first >= last:
                return None
            there.append(slice(first - start, last - start))
            here.append(slice(first - offset, last - offset))
        return tuple(there), self.rows[tuple(here)]


def _is_in_runs(tensor: Tensor) -> bool:
    """Whether ranks hold several runs of rows each."""
    placements: Any = getattr(tensor, "placements", ()) if is_dtensor(tensor) else ()
    return any(isinstance(place, _StridedShard) for place in placements)


def _runs_of(tensor: Any) -> list[RowRun]:
    """The runs that this rank holds of a DTensor that is cut along dimension 0 alone."""
    rows = torch.arange(tensor.shape[0])
    mesh = tensor.device_mesh
    for place, ranks, rank in zip(
        tensor.placements, mesh.shape, mesh.get_coordinate(), strict=True
    ):
        if isinstance(place, _StridedShard):
            parts = [_chunk(run, ranks, rank) for run in rows.chunk(int(place.split_factor))]
            rows = torch.cat(parts)
        elif isinstance(place, Shard):
            rows = _chunk(rows, ranks, rank)
        if not place.is_replicate() and place.dim != 0:
            raise AssertionError(f"{place} of {tuple(tensor.shape)}")
    local_rows, runs, start = tensor.to_local(), [], 0
    ends = [*((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    for end in ends:
        if end > start:
            zeros = (0,) * (tensor.dim() - 1)
            runs.append(RowRun((int(rows[start]), *zeros), local_rows[start:end]))
        start = end
    return runs


def _chunk(rows: Tensor, ranks: int, rank: int) -> Tensor:
    """The part of a rank, as `Shard` cuts: the last ranks may have none."""
    most = -(-len(rows) // ranks)
    return rows[most * rank : most * (rank + 1)]


# --- parts of dtensors ---------------------------------------------------------------------------
# Plans of states with DTensors, by the planner of torch.distributed.checkpoint. Only its planner is
# used; nothing of it reads, writes or pickles.
#
# That planner supports one box of each tensor on a rank. If a rank has several runs of rows, as of
# query, key and value in one weight, each run is a part by itself.


KINDS = {WHOLE: WriteItemType.TENSOR, SHARD: WriteItemType.SHARD}


def _dtensor_parts(tensors: dict[str, Tensor]) -> dict[WritePart, Tensor]:
    """The parts that this rank holds."""
    in_runs = {path: tensor for path, tensor in tensors.items() if _is_in_runs(tensor)}
    planner = _save_planner({path: t for path, t in tensors.items() if path not in in_runs})
    parts: dict[WritePart, Any] = {
        _part(item): planner.resolve_data(item) for item in planner.create_local_plan().items
    }
    for path, tensor in in_runs.items():
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        for run in _runs_of(tensor):
            sizes = tuple(run.rows.shape)
            parts[WritePart(path, dtype, shape, run.offsets, sizes, SHARD)] = run.rows
    return {part: tensor.detach() for part, tensor in parts.items()}


def dtensor_plan(ranks: list[list[WritePart]]) -> list[list[WritePart]]:
    """The parts that each rank writes, from the parts of all. The same on every rank."""
    plans = [SavePlan([_item(part) for part in parts]) for parts in ranks]
    finished, _ = _save_planner({}).create_global_plan(plans)
    return [[_part(item) for item in plan.items] for plan in finished]


def _dtensor_reads(saved: dict[str, SavedTensor], targets: dict[str, Tensor]) -> list[Read]:
    """The reads that fill `targets`, each from one chunk."""
    in_runs = {path: target for path, target in targets.items() if _is_in_runs(target)}
    local_reads = [
        Read(path, chunk, *overlap)
        for path, target in in_runs.items()
        for chunk in filter(holds, saved[path].chunks)
        for run in _runs_of(target)
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
        local_reads.append(Read(path, chunk, part, planner.resolve_tensor(item)))
    return local_reads


def _save_planner(tensors: dict[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def _part(item: WriteItem) -> WritePart:
    data = item.tensor_data
    assert data is not None, "tree.flatten lets tensors through, and nothing else"
    kind = next(name for name, value in KINDS.items() if value == item.type)
    dtype = NAMES[data.properties.dtype]
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return WritePart(item.index.fqn, dtype, tuple(data.size), offsets, sizes, kind)


def _item(part: WritePart) -> WriteItem:
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


def by_piece(parts: Iterable[WritePart]) -> dict[str, WritePart]:
    """The parts by the names that they have in the file of a rank."""
    return {piece_name(p.path, p.shape, p.offsets, p.sizes): p for p in parts}


def layout_of(named: dict[str, WritePart]) -> FileLayout:
    """The file of a rank that writes these parts."""
    return lay_out({name: as_written(p.dtype, p.sizes) for name, p in named.items()})


class TorchSnapshot:
    """Copies of tensors, laid out as their file. Taking another one writes over the last."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._parts: list[WritePart] = []
        self._places: list[Tensor] = []
        self.layout = lay_out({})

    @property
    def flat(self) -> Tensor:
        """The bytes after the header, as a tensor."""
        return self._buffer[: self.layout.data_bytes]

    @property
    def data(self) -> memoryview:
        """The bytes after the header."""
        return self.flat.numpy().data

    def take(self, tensors: dict[WritePart, Tensor]) -> None:
        """Copy the tensors; returns when they may change again."""
        on_gpu = self.make_room(tensors)
        for place, (part, tensor) in zip(self._places, tensors.items(), strict=True):
            written = reals(tensor) if part.dtype in PAIR else tensor
            place.copy_(written, non_blocking=on_gpu)
        if on_gpu:
            accelerator.synchronize({tensor.device for tensor in tensors.values()})

    def make_room(self, tensors: dict[WritePart, Tensor]) -> bool:
        """Take the memory for copies of these tensors; returns whether any is on a GPU."""
        on_gpu = not all([tensor.is_cpu for tensor in tensors.values()])
        parts = list(tensors)
        if parts != self._parts:
            self._lay_out(parts, on_gpu)
        return on_gpu

    def _lay_out(self, parts: list[WritePart], on_gpu: bool) -> None:
        named = by_piece(parts)
        self.layout = layout_of(named)
        self._parts, self._places = [], []
        if self._buffer.numel() < self.layout.data_bytes:
            size = self.layout.data_bytes
            self._buffer = _memory(size, pin=on_gpu)
            self._buffer[:: mmap.PAGESIZE] = 0  # a page that was never touched costs the first copy
        for name in named:
            piece = self.layout.pieces[name]
            flat = self._buffer[piece.begin : piece.end].view(DTYPES[piece.dtype])
            self._places.append(flat.view(piece.shape))
        self._parts = parts


def _memory(size: int, *, pin: bool) -> Tensor:
    """So many bytes of the host; where none can be pinned, such as take a slower copy."""
    if pin:
        with suppress(RuntimeError):
            return accelerator.pinned_zeros(size, torch.uint8, pin=True)
    try:
        return torch.zeros(size, dtype=torch.uint8)
    except RuntimeError as error:  # torch's way to say so
        raise MemoryError(f"no memory for a copy of {size} bytes") from error


def read_files(folder: Path, saved: dict[str, SavedTensor], targets: dict[str, Tensor]) -> None:
    """Fill `targets` from the files of a checkpoint, each with what it needs of any chunk.

    Raises `BadCheckpoint` if a file is not what the manifest says; the digests are not read.
    """
    by_file: dict[str, list[Read]] = defaultdict(list)
    for read in load_plan(saved, targets):
        by_file[read.chunk.file].append(read)
    for file, reads in sorted(by_file.items()):
        try:
            with safe_open(str(folder / file), framework="pt") as there:
                for read in reads:
                    tensor, sizes = saved[read.path], read.chunk.sizes
                    name = piece_name(read.path, tensor.shape, read.chunk.offsets, sizes)
                    whole = there.get_tensor(name)
                    if tensor.dtype in PAIR and whole.shape == (*sizes, 2):
                        whole = torch.view_as_complex(whole.clone())  # aligned to 16 bytes
                    _check_read(file, name, whole, tensor.dtype, sizes)
                    read.target.copy_(whole[read.part])
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{file}: {error}") from None


def _check_read(file: str, name: str, tensor: Tensor, dtype: str, sizes: tuple[int, ...]) -> None:
    if tensor.dtype != DTYPES[dtype] or tuple(tensor.shape) != sizes:
        kind = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise BadCheckpoint(f"{file}: {name} is {kind}, not {dtype} of shape {sizes}")
