"""The state of a training in the memory of its ranks: copies with `--spare-state`, and replicas.

After each step every rank copies its part of the state, planned as for a checkpoint, and sends the
copy to the next rank, the last rank to the first. So where a rank is lost, or several that are not
neighbours, the others have all parts (`newest_spare` in `engine.regroup`). A rank has two versions,
and writes over the older one: until all ranks have the newer one, the older one stays whole.

Under `hsdp` several ranks hold each part without a copy: `LiveParts`, what a rank trained with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allranks.checkpoint.checkpointer import is_below
from allranks.checkpoint.format import PAIR, Manifest, SavedTensor, piece_name
from allranks.checkpoint.format import flatten as flatten_as
from allranks.torch.checkpoint.plan import (
    ELSEWHERE,
    Planner,
    Read,
    TorchSnapshot,
    WritePart,
    WritePlan,
    by_piece,
    global_plan,
    layout_of,
    load_plan,
    parts_text,
    read_parts,
)
from allranks.torch.checkpoint.state import DTYPES, flatten
from allranks.torch.comm.comm import Comm
from allranks.training.engine.regroup import Spare, SpareParts

CALLBACKS = "common/callbacks"
"""Where the states of callbacks are."""


@dataclass(frozen=True)
class Version:
    """The state after `step`, as the ranks of `group` had it, and the parts that this rank has.

    Parts go by the `numbers` of the processes that made them, in rank order. A part is the bytes of
    the file that a checkpoint would have. `common` is the state without its tensors.
    """

    step: int
    group: int
    numbers: tuple[int, ...]
    common: Any
    plan: WritePlan
    parts: dict[int, Tensor]

    @cached_property
    def manifest(self) -> Manifest:
        """The version as the checkpoint that it is, without files and values of single ranks."""
        values = {"common": self.common, "own": [None] * len(self.numbers)}
        tensors = self.plan.tensors([str(number) for number in self.numbers])
        return Manifest(self.step, 0.0, len(self.numbers), {}, tensors, values)


@dataclass(frozen=True)
class PlacedRank:
    """The process `number` of an elastic job, in its `group`, which is `comm`."""

    number: int
    group: int
    comm: Comm


def _local(value: Any, path: str) -> Tensor | None:
    """What this rank holds of a tensor: a DTensor without a step of autograd, which costs more."""
    return getattr(value, "_local_tensor", value) if isinstance(value, Tensor) else None


class SpareState:
    """The versions of one process, through all groups of an elastic job."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._numbers: tuple[int, ...] = ()
        self._snapshots = TorchSnapshot(), TorchSnapshot()
        self._received = [torch.empty(0, dtype=torch.uint8)] * 2
        self._versions: list[Version | None] = [None, None]
        self._looks: list[Any] = []
        self._plan, self._sizes = WritePlan(()), list[int]()
        self._whole = 0  # the place of the newest version that is whole on all ranks

    def is_at(self, step: int, group: int) -> bool:
        """Whether all ranks of this group have the state after this step."""
        newest = self._versions[self._whole]
        return newest is not None and (newest.step, newest.group) == (step, group)

    def survives(self, members: tuple[int, ...]) -> bool:
        """Whether all parts are there without the ranks of the last refresh that leave."""
        numbers = self._numbers
        neighbours = pairwise((*numbers, numbers[0]))
        return all(number in members or after in members for number, after in neighbours)

    def listed(self) -> list[SpareParts]:
        """What this rank has of each version."""
        return [
            SpareParts(version.step, version.group, version.numbers, tuple(version.parts))
            for version in self._versions
            if version is not None
        ]

    def refresh(
        self, rank: PlacedRank, step: int, local_state: Any, state: Callable[[], Any]
    ) -> None:
        """Copy the part of this rank, and exchange copies; every rank of the group calls this.

        `state()` is the state as a checkpoint has it, and `local_state` the same with tensors of
        this rank: making DTensors of these would take longer than the copy. Gathers one digest, and
        plans that have changed. Sends the bytes of the part. On return all ranks have the new
        version. Raises `PeerLost`.
        """
        comm = rank.comm
        if self._planner is None or self._planner.comm is not comm:
            self._planner, self._looks = Planner(comm), []
            self._numbers = tuple(int(text) for text in comm.gather_texts(str(rank.number)))
        skeleton, tensors = flatten_as(local_state, "common", _local)
        looks = [(path, tensor.dtype, tensor.shape) for path, tensor in tensors.items()]
        if looks and looks == self._looks:
            plan, writes = self._planner.plan_again(step, tensors)
        else:
            skeleton, whole = flatten(state(), "common")
            plan, writes = self._planner.plan(step, whole)
            self._looks = looks if self._planner.has_parts(tensors) else []
        if plan is not self._plan:
            self._plan, self._sizes = plan, [layout_of(by_piece(p)).data_bytes for p in plan.parts]
        place = 1 - self._whole
        snapshot, self._versions[place] = self._snapshots[place], None
        snapshot.take(writes)
        parts = {rank.number: snapshot.flat}
        version = Version(step, rank.group, self._numbers, skeleton, plan, parts)
        self._versions[place] = version
        if comm.size > 1:
            before = (comm.rank - 1) % comm.size
            version.parts[self._numbers[before]] = self._exchange(comm, place, snapshot.flat)
            comm.barrier()
        self._whole = place

    def _exchange(self, comm: Comm, place: int, local_part: Tensor) -> Tensor:
        """Send the part of this rank to the next one; returns that of the rank before."""
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        size = self._sizes[before]
        if self._received[place].numel() != size:
            self._received[place] = torch.empty(size, dtype=torch.uint8)
        receives, gives = [0] * comm.size, [0] * comm.size
        receives[before], gives[after] = size, local_part.numel()
        received = self._received[place]
        comm.all_to_all(received, local_part, receives, gives, "control").wait()
        return received

    def opened(self, comm: Comm, spare: Spare) -> Version:
        """The version that the ranks of `comm` load, with the parts that this rank has of it.

        Every rank calls this, one without any part too. Sends a text. No refresh writes over it
        before all ranks have the next version.
        """
        version = None
        for place, candidate in enumerate(self._versions):
            if candidate and (candidate.step, candidate.group) == (spare.step, spare.group):
                version, self._whole = candidate, place
        source, text = min(spare.holders.values()), ""
        if comm.rank == source and version is not None:
            plans = [parts_text(parts) for parts in version.plan.parts]
            text = json.dumps([version.numbers, version.common, plans])
        numbers, common, plans = json.loads(comm.gather_texts(text)[source])
        plan = WritePlan(tuple(tuple(read_parts(text)) for text in plans))
        parts = {} if version is None else version.parts
        return Version(spare.step, spare.group, tuple(numbers), common, plan, parts)


@dataclass(frozen=True)
class LiveParts:
    """What this rank trained with, after `step`: part `place` of `places`, which others have, too.

    `common` is the state without its `tensors`, which are no copies: their model trains no more.
    `callbacks` are the states of those of this rank.
    """

    step: int
    group: int
    place: int
    places: int
    common: Any
    tensors: dict[WritePart, Tensor]
    callbacks: dict[str, Any]

    def listed(self) -> list[SpareParts]:
        """What this rank has, as of copies; parts go by their places."""
        return [SpareParts(self.step, self.group, tuple(range(self.places)), (self.place,))]


def opened_live(comm: Comm, spare: Spare, live: LiveParts | None) -> Version:
    """The version that the ranks of `comm` load of what some of them trained with.

    Every rank calls this, one without any part (`None`) too. Gathers the plans of all. Callbacks
    may hold other tensors on each rank: those of the first place are the version's.
    """
    text = "" if live is None else json.dumps([live.common, parts_text(live.tensors)])
    texts, places = comm.gather_texts(text), tuple(sorted(spare.holders))
    of_places = [json.loads(texts[spare.holders[place]]) for place in places]
    first, *others = [read_parts(parts) for _, parts in of_places]
    theirs = [replace(p, kind=ELSEWHERE) for p in first if is_below(p.path, CALLBACKS)]
    others = [[p for p in parts if not is_below(p.path, CALLBACKS)] + theirs for parts in others]
    plan = global_plan([first, *others])
    parts = {}
    if live is not None and spare.holders[live.place] == comm.rank:
        snapshot = TorchSnapshot()
        snapshot.take({part: live.tensors[part] for part in plan.parts[live.place]})
        parts = {live.place: snapshot.flat}
    return Version(spare.step, spare.group, places, of_places[0][0], plan, parts)


@dataclass(frozen=True)
class SpareReader:
    """Reads a version that the ranks of `comm` have in parts; `holders` as in `Spare`."""

    comm: Comm
    version: Version
    holders: dict[int, int]

    def fill(self, folder: Path, saved: dict[str, SavedTensor], targets: dict[str, Tensor]) -> None:
        """Fill `targets` as `read_files` does; every rank calls this.

        Broadcasts all parts, one after the other, so that a rank needs memory for one.
        """
        by_part: dict[str, list[Read]] = defaultdict(list)
        for read in load_plan(saved, targets):
            by_part[read.chunk.file].append(read)
        for number, pieces in self._parts():
            for read in by_part[str(number)]:
                shape, chunk = saved[read.path].shape, read.chunk
                piece = pieces[piece_name(read.path, shape, chunk.offsets, chunk.sizes)]
                is_pair = saved[read.path].dtype in PAIR
                read.target.copy_((torch.view_as_complex(piece) if is_pair else piece)[read.part])

    def _parts(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The tensors of each part, by the name of the piece."""
        version = self.version
        for number, parts in zip(version.numbers, version.plan.parts, strict=True):
            layout, source = layout_of(by_piece(parts)), self.holders[number]
            if source == self.comm.rank:
                flat = version.parts[number]
            else:
                flat = torch.empty(layout.data_bytes, dtype=torch.uint8)
            self.comm.broadcast(flat, source=source)
            yield (
                number,
                {
                    name: flat[piece.begin : piece.end].view(DTYPES[piece.dtype]).view(piece.shape)
                    for name, piece in layout.pieces.items()
                },
            )
