"""Sharded training state: which of its tensors correspond to parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    debug,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from allranks.checkpoint.format import unflatten
from allranks.errors import RequestError
from allranks.strategies.mesh import SHARD, TENSOR
from allranks.torch.checkpoint.state import saved_names, whole
from allranks.torch.checkpoint.tree import DTYPES, NAMES, flatten
from allranks.torch.comm.comm import Comm
from allranks.torch.optimizers.elementwise import WeightParts, groups_of_whole
from allranks.torch.optimizers.made import OptimizerArguments
from allranks.torch.parallel.tensor.cutting import CutModel
from allranks.torch.parallel.tensor.exchange import Along, TensorExchange


def with_parameters(
    state: dict[str, Any],
    model: nn.Module,
    change: Callable[[str, Tensor], Tensor],
    kept_whole: Mapping[str, bool],
) -> dict[str, Any]:
    """A training state with `change(name, tensor)` applied to all tensors that follow parameters.

    These are weights, optimizer state of their shape, and averages. Optimizer state of parameters
    in `kept_whole` is unchanged, or left out if another rank owns it. Raises `RequestError` for a
    weight that the state dict of the model does not have by its name.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    own_name = {alias: name for name, names in saved_names(model).items() for alias in names}
    if missing := sorted(shapes.keys() - set(own_name.values())):
        raise RequestError(
            asked="a checkpoint of weights that ranks hold parts of",
            found=f"{missing[0]!r}, which stands in no state dict under that name",
            why="nobody could tell which weight of a checkpoint is which",
            do="take the wrapper that renames it off, or --strategy ddp",
        )

    def changed(named: dict[str, Any]) -> dict[str, Any]:
        return {
            n: change(own_name[n], t) if own_name.get(n) in shapes else t for n, t in named.items()
        }

    optimizer = dict(state["optimizer"])
    of_held = {name: state["model"][alias].shape for alias, name in own_name.items()}
    cut = {n: values for n, values in optimizer["state"].items() if n not in kept_whole}
    states = {n: values for n, values in optimizer["state"].items() if kept_whole.get(n)}
    plain = _differently_shaped(cut, of_held)
    for name, values in cut.items():
        states[name] = {
            key: change(name, value)
            if is_tensor_of(value, of_held[name]) and not (key in plain and len(of_held[name]) < 2)
            else value
            for key, value in values.items()
        }
    optimizer["state"] = states
    changed_state = {**state, "model": changed(state["model"]), "optimizer": optimizer}
    for weights in ("average", "evaluated"):
        if weights in state:
            changed_state[weights] = changed(state[weights])
    return changed_state


def known_to_all(states: dict[str, Any], names: Iterable[str], comm: Comm) -> dict[str, Any]:
    """Optimizer states of all ranks, with meta tensors for other ranks; this rank tells `names`.

    Every rank calls this; sends names and shapes (`control`).
    """
    skeleton, tensors = flatten({name: states[name] for name in names if name in states}, "kept")
    looks = {path: [NAMES[t.dtype], list(t.shape)] for path, t in tensors.items()}
    known: dict[str, Any] = {}
    for text in comm.gather_texts(json.dumps([skeleton, looks])):
        theirs, looks = json.loads(text)
        metas = {
            path: torch.empty(shape, dtype=DTYPES[kind], device="meta")
            for path, (kind, shape) in looks.items()
        }
        known.update(unflatten(theirs, metas))
    return {**known, **states}


def _differently_shaped(states: dict[str, Any], shapes: dict[str, torch.Size]) -> set[str]:
    """The keys of optimizer state whose shape differs from that of a matrix parameter.

    A rank may hold one number of a vector, in the shape of a counter: only matrices can tell.
    """
    return {
        key
        for name, values in states.items()
        for key, value in values.items()
        if len(shapes[name]) > 1 and not is_tensor_of(value, shapes[name])
    }


def is_tensor_of(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


# --- dtensors ------------------------------------------------------------------------------------
# DTensors for states, checkpoints and traces.
#
# Loaded only if a job needs them: the import takes a second.


__all__ = ["Replicate", "Shard", "device_mesh", "distribute_tensor", "dtensor", "mesh_of"]


def device_mesh(comm: Comm, axis: str) -> DeviceMesh:
    """The ranks of `comm` as a mesh of one axis; each of them calls this.

    `comm` counts what torch sends there, as `control`.
    """
    group = comm.counting_group("control")
    return mesh_over(group, comm.device.type, None, (axis,))


def mesh_of(
    axes: Sequence[tuple[str, Comm]], ranks: int, kinds: Mapping[str, str] | None = None
) -> DeviceMesh:
    """All `ranks` of the job as a mesh of these axes; each of them calls this.

    Each axis counts what torch sends there, as `control` or by `kinds`.
    """
    kinds = kinds or {}
    groups = [comm.counting_group(kinds.get(name, "control")) for name, comm in axes]
    grid = torch.arange(ranks).view([comm.size for _, comm in axes])
    names = tuple(name for name, _ in axes)
    return mesh_over(groups, axes[0][1].device.type, grid, names)


def mesh_over(
    groups: dist.ProcessGroup | list[dist.ProcessGroup],
    device: str,
    grid: Tensor | None,
    names: tuple[str, ...],
) -> DeviceMesh:
    """A mesh of a group, or of a group for each axis of `grid`; each of their ranks calls this.

    Torch caches the mesh of the result of each operation, for any mesh with the same ranks. After
    an earlier training in this process, the groups of that mesh are gone. So the cache is cleared.
    """
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    return DeviceMesh.from_group(groups, device, grid, mesh_dim_names=names)


def shard_of(along: Along) -> Placement:
    """The placement of a tensor that is cut like this."""
    return (
        Shard(along.dim) if along.runs == 1 else _StridedShard(along.dim, split_factor=along.runs)
    )


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor
) -> DTensor:
    """The DTensor of a local part; `whole` has the full shape, and may be on meta.

    No communication.
    """
    return DTensor.from_local(
        local.detach(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=torch.empty_like(whole, device="meta").stride(),
    )


# --- two axes ------------------------------------------------------------------------------------
# Weights that are cut twice: layers over the tensor axis, and the rows of each part over shards.
#
# `fully_shard` knows only the second cut: its DTensors are parts of parts. A state has DTensors
# over both axes, tensor first, so that any other strategy can load it. On 2 x 2 ranks, for a weight
# of 8 rows that is cut by rows twice:
#
#     tensor 0: shard 0 has rows 0-1, shard 1 rows 2-3      tensor 1: rows 4-5, rows 6-7


class TwoAxes:
    """Converts this rank's parts of the weights of `cut`, on a mesh of both axes.

    Every rank constructs one. `shards` are the ranks with the same part of every layer.
    """

    def __init__(self, cut: CutModel, exchange: TensorExchange, shards: Comm) -> None:
        self.cut, self.exchange, self.shards = cut, exchange, shards
        self.arguments: OptimizerArguments | None = None
        tensor = exchange.comm
        groups = [comm.counting_group("control") for comm in (tensor, shards)]
        ranks = torch.arange(shards.size * tensor.size).view(shards.size, tensor.size).t()
        self.mesh = mesh_over(groups, shards.device.type, ranks.contiguous(), (TENSOR, SHARD))

    def to_global(self, name: str, tensor: Tensor) -> Tensor:
        """The DTensor of a state for one of `fully_shard`; other tensors are full already."""
        if not isinstance(tensor, DTensor):
            return tensor
        along = self.cut.dims.get(name)
        places: list[Placement] = [Replicate() if along is None else shard_of(along), Shard(0)]
        like = torch.empty(self.cut.shapes[name], dtype=tensor.dtype, device="meta")
        return dtensor(tensor.to_local(), self.mesh, places, like)

    def to_local(self, name: str, saved: Tensor, like: DTensor) -> Tensor:
        """The inverse of `to_global`; `saved` may also be a full tensor."""
        if isinstance(saved, DTensor):
            return dtensor(saved.to_local(), like.device_mesh, like.placements, like)
        part = self.part(name, saved)
        return distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)

    def full(self, name: str, tensor: Tensor) -> Tensor:
        """The full tensor: gathered over shards, then over the tensor axis."""
        along, part = self.cut.dims.get(name), whole(tensor)
        if along is None or not isinstance(tensor, DTensor):
            return part
        return self.exchange.all(part, along, self.cut.shapes[name][along.dim])

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a full tensor that the ranks of a shard axis hold together."""
        return self.cut.part_of(name, tensor, self.exchange)

    def check_updates(self, optimizer: Optimizer, model: nn.Module, asked: str) -> None:
        """Raise `RequestError` for an optimizer that needs full parameters.

        It is examined at the first call, and when its hyper-parameters have changed.
        """
        self.arguments = self.arguments or OptimizerArguments(optimizer)
        if self.arguments.is_new() and groups_of_whole(optimizer, asked, self._cuts(model)):
            raise RequestError(
                asked=f"{asked} with {type(optimizer).__name__}",
                found="the update of some rows is another one by themselves",
                why="a parameter is cut over two axes, and nobody gathers it over both",
                do="--strategy fsdp or tensor, or an optimizer that updates every number by itself",
            )

    def _cuts(self, model: nn.Module) -> dict[int, WeightParts]:
        """The cuts of every parameter: along the tensor axis, then each part by rows."""
        shards = self.shards.size

        def by_rows(parts: Callable[[Tensor], list[Tensor]], whole: Tensor) -> list[Tensor]:
            return [rows for part in parts(whole) for rows in part.chunk(shards)]

        once = self.cut.cuts(model, self.exchange.comm.size)
        every = {
            id(p): WeightParts(tuple(p.shape), lambda whole: [whole]) for p in model.parameters()
        }
        return {
            key: WeightParts(cut.shape, partial(by_rows, cut.parts))
            for key, cut in {**every, **once}.items()
            if cut.shape
        }
