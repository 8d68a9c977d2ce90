"""Weights that are cut twice: layers over the tensor axis, and the rows of each part over shards.

`fully_shard` knows of the second cut alone: its DTensors are parts of parts. A state has DTensors
over both axes, tensor first, so that it can be taken up by any other strategy. On 2 x 2 ranks, for
a weight of 8 rows that is cut by rows twice:

    tensor 0: shard 0 has rows 0-1, shard 1 rows 2-3      tensor 1: rows 4-5, rows 6-7
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.strategies.mesh import SHARD, TENSOR
from allranks.torch.comm.comm import Comm
from allranks.torch.optimizers.asked import Asked
from allranks.torch.optimizers.elementwise import Cut, groups_of_whole
from allranks.torch.sharding.dtensors import dtensor, mesh_over, shard_of
from allranks.torch.state import whole
from allranks.torch.tensor_parallel.cutting import CutModel
from allranks.torch.tensor_parallel.exchange import Exchange


class TwoAxes:
    """What one rank holds of the weights of `cut`, on a mesh of both axes.

    Every rank makes one. `shards` are the ranks with the same part of every layer.
    """

    def __init__(self, cut: CutModel, exchange: Exchange, shards: Comm) -> None:
        self.cut, self.exchange, self.shards = cut, exchange, shards
        self.asked: Asked | None = None
        tensor = exchange.comm
        groups = [comm.counting_group("control") for comm in (tensor, shards)]
        ranks = torch.arange(shards.size * tensor.size).view(shards.size, tensor.size).t()
        self.mesh = mesh_over(groups, shards.device.type, ranks.contiguous(), (TENSOR, SHARD))

    def saved(self, name: str, held: Tensor) -> Tensor:
        """What stands in a state for a DTensor of `fully_shard`; anything else is whole."""
        if not isinstance(held, DTensor):
            return held
        along = self.cut.dims.get(name)
        places: list[Placement] = [Replicate() if along is None else shard_of(along), Shard(0)]
        like = torch.empty(self.cut.shapes[name], dtype=held.dtype, device="meta")
        return dtensor(held.to_local(), self.mesh, places, like)

    def held(self, name: str, saved: Tensor, like: DTensor) -> Tensor:
        """What `saved` was given, or what it would be given of a whole tensor."""
        if isinstance(saved, DTensor):
            return dtensor(saved.to_local(), like.device_mesh, like.placements, like)
        part = self.part(name, saved)
        return distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)

    def full(self, name: str, held: Tensor) -> Tensor:
        """The whole of what `saved` is given: over shards, then over the tensor axis."""
        along, part = self.cut.dims.get(name), whole(held)
        if along is None or not isinstance(held, DTensor):
            return part
        return self.exchange.all(part, along, self.cut.shapes[name][along.dim])

    def part(self, name: str, given: Tensor) -> Tensor:
        """What the ranks of a shard axis hold together of a whole tensor."""
        return self.cut.part_of(name, given, self.exchange)

    def check_updates(self, optimizer: Optimizer, model: nn.Module, asked: str) -> None:
        """Raise `RequestError` for an optimizer that needs a parameter whole, on both axes.

        It is asked at the first call, and where its hyper-parameters have changed.
        """
        self.asked = self.asked or Asked(optimizer)
        if self.asked.is_new() and groups_of_whole(optimizer, asked, self._cuts(model)):
            raise RequestError(
                asked=f"{asked} with {type(optimizer).__name__}",
                found="the update of some rows is another one by themselves",
                why="a parameter is cut over two axes, and nobody gathers it over both",
                do="--strategy fsdp or tensor, or an optimizer that updates every number by itself",
            )

    def _cuts(self, model: nn.Module) -> dict[int, Cut]:
        """Of every parameter: along the tensor axis, and then each part by rows."""
        shards = self.shards.size

        def by_rows(parts: Callable[[Tensor], list[Tensor]], whole: Tensor) -> list[Tensor]:
            return [rows for part in parts(whole) for rows in part.chunk(shards)]

        once = self.cut.cuts(model, self.exchange.comm.size)
        every = {id(p): Cut(tuple(p.shape), lambda whole: [whole]) for p in model.parameters()}
        return {
            key: Cut(cut.shape, partial(by_rows, cut.parts))
            for key, cut in {**every, **once}.items()
            if cut.shape
        }
