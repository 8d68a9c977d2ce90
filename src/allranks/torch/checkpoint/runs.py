"""What a rank holds of a tensor in several runs of rows: `_StridedShard` of torch.

    rows of one weight      q q q q k k k k v v v v
    on rank 0 of 2          q q     k k     v v          three runs, side by side in its memory

Loaded only for a state with DTensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from allranks.torch.checkpoint.tree import is_dtensor

Box = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Rows that are side by side in the whole and here: where they begin there, and they."""

    offsets: Box
    held: Tensor

    def overlap(self, offsets: Box, sizes: Box) -> tuple[tuple[slice, ...], Tensor] | None:
        """What a box of the whole has of them: where in the box, and here; `None`: nothing."""
        there, here = [], []
        for own, size, start, length in zip(
            self.offsets, self.held.shape, offsets, sizes, strict=True
        ):
            first, last = max(own, start), min(own + size, start + length)
            if first >= last:
                return None
            there.append(slice(first - start, last - start))
            here.append(slice(first - own, last - own))
        return tuple(there), self.held[tuple(here)]


def is_in_runs(tensor: Tensor) -> bool:
    """Whether ranks hold several runs of rows each."""
    placements: Any = getattr(tensor, "placements", ()) if is_dtensor(tensor) else ()
    return any(isinstance(place, _StridedShard) for place in placements)


def runs_of(tensor: Any) -> list[Run]:
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
    held, found, start = tensor.to_local(), [], 0
    ends = [*((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    for end in ends:
        if end > start:
            rest = (0,) * (tensor.dim() - 1)
            found.append(Run((int(rows[start]), *rest), held[start:end]))
        start = end
    return found


def _chunk(rows: Tensor, ranks: int, rank: int) -> Tensor:
    """The part of a rank, as `Shard` cuts: the last ranks may have none."""
    most = -(-len(rows) // ranks)
    return rows[most * rank : most * (rank + 1)]
