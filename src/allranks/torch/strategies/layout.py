"""Where the parameters of a model are, and how a sharded state is saved and loaded: `Layout`.

Each strategy has one `layout`, which `parallelize` sets. It answers, for a parameter by its name,
and for every tensor that follows it (its gradient, its average, optimizer state of its shape):

    part         this rank's part of a full tensor
    to_global    what a state has in place of the local tensor: a DTensor, if it is a part
    to_local     the inverse, also for a full tensor of another strategy's checkpoint
    full         the full tensor, gathered from the ranks that hold it

`saved` and `loaded` convert a whole training state. A checkpoint has tensors that are full, or
DTensors, or on meta, if other ranks hold them; `checkpoint.plan` decides which rank writes what.

    strategy              a rank holds                                       class
    ddp, single, ps, ...  all parameters in full                             `Layout`
    zero1, zero2          all in full; updates its rows of each (`owned`)    `Layout`
    tensor                its part of each layer of the plan                 `Layout`
    expert                its experts                                        `Layout`
    pipelines, branches   some parameters, in full                           `StageLayout`
    mesh                  its part of each layer of some stages              `StageLayout`
    fsdp, hsdp            its rows of each, as DTensors of torch             `UnitLayout`
    fsdp:tensor=K         its rows of its part of each layer                 `TwoAxes`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
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

from allranks.checkpoint.format import unflatten
from allranks.errors import RequestError
from allranks.job.place import Placed
from allranks.torch.checkpoint.state import DTYPES, NAMES, flatten, local, saved_names
from allranks.torch.comm.comm import Comm
from allranks.torch.model.reals import reals
from allranks.torch.optimizers.elementwise import WeightParts

# --- cuts ----------------------------------------------------------------------------------------
# How the ranks of an axis divide a tensor.


def part_sizes(size: int, ranks: int) -> list[int]:
    """The length of each rank's part of a dimension, as by `torch.chunk` and DTensor."""
    most = -(-size // ranks)
    return [max(0, min(most, size - rank * most)) for rank in range(ranks)]


class Along(NamedTuple):
    """How a tensor is cut: along `dim`, which has `runs` of one length, each cut separately.

    The rows of query, key and value in one weight are 3 runs: a rank has its heads of each.
    """

    dim: int
    runs: int = 1

    def local_view(self, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """A view of the part of a `rank`, with the runs in an additional dimension."""
        dim = self.dim
        if self.runs > 1:
            whole, dim = whole.unflatten(dim, (self.runs, -1)), dim + 1
        sizes = part_sizes(whole.shape[dim], ranks)
        return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])

    def local_part(self, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """The part of a `rank` in the dimensions of the whole; a view if there is one run."""
        part = self.local_view(whole, ranks, rank)
        return part if self.runs == 1 else part.flatten(self.dim, self.dim + 1)

    def parts(self, ranks: int, whole: Tensor) -> list[Tensor]:
        """The parts of all ranks."""
        return [self.local_part(whole, ranks, rank) for rank in range(ranks)]


ROWS = Along(0)


@dataclass(frozen=True)
class Cut:
    """How ranks hold a parameter; `like` has its full shape and strides, on meta."""

    like: Tensor
    along: Along = ROWS

    @property
    def shape(self) -> torch.Size:
        """The full shape."""
        return self.like.shape

    def parts(self, ranks: int) -> WeightParts:
        """The parts for so many ranks."""
        return WeightParts(tuple(self.shape), partial(self.along.parts, ranks))

    def part_numel(self, ranks: int, rank: int) -> int:
        """The number of elements of the part of a `rank`."""
        dim, runs = self.along
        rows = runs * part_sizes(self.shape[dim] // runs, ranks)[rank]
        return rows * (self.shape.numel() // max(1, self.shape[dim]))


NO_CUTS: Mapping[str, Cut] = MappingProxyType({})
Gather = Callable[[Tensor, Along, int], Tensor]

# --- layouts -------------------------------------------------------------------------------------


class Layout:
    """The ranks of `comm` hold the parameters of `cuts` in parts, and all others in full.

    A state has DTensors over `mesh`, whose last axis is `comm`. `gather(part, along, size)` returns
    a full tensor, if these DTensors do not.
    """

    def __init__(
        self,
        comm: Comm,
        cuts: Mapping[str, Cut] = NO_CUTS,
        mesh: DeviceMesh | None = None,
        gather: Gather | None = None,
    ) -> None:
        self.comm, self.cuts, self.mesh, self.gather = comm, cuts, mesh, gather
        self.kept_whole: Mapping[str, bool] = {}
        """Parameters that are each updated in full by one rank of `comm`: whether this one does."""

    def is_cut(self, name: str, tensor: Tensor) -> bool:
        """Whether the local tensor is a part, and other ranks hold the rest."""
        return isinstance(tensor, DTensor) or (name in self.cuts and self.mesh is not None)

    def full_like(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with the full shape: on meta, unless the local one has it."""
        cut = self.cuts.get(name)
        return tensor if cut is None else cut.like.to(tensor.dtype)

    def part(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of a full tensor; all of it, if it is not cut. No communication."""
        cut = self.cuts.get(name)
        if cut is None or self.comm.size == 1:
            return full
        return cut.along.local_part(full, self.comm.size, self.comm.rank).contiguous()

    def to_global(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of a state for a local one; one on meta, if another rank holds it."""
        cut = self.cuts.get(name)
        if cut is None or self.mesh is None:
            return tensor
        if tensor.is_meta:
            return self.full_like(name, tensor)
        copies = [Replicate()] * (self.mesh.ndim - 1)
        return dtensor(tensor, self.mesh, [*copies, shard_of(cut.along)], cut.like)

    def to_local(self, name: str, saved: Tensor) -> Tensor:
        """The inverse of `to_global`; `saved` may also be a full tensor."""
        return local(saved) if isinstance(saved, DTensor) else self.part(name, saved)

    def full(self, name: str, tensor: Tensor) -> Tensor:
        """The full tensor; every rank calls this."""
        cut = self.cuts.get(name)
        if cut is None or self.gather is None:
            return whole(self.to_global(name, tensor))
        return self.gather(tensor.detach(), cut.along, cut.shape[cut.along.dim])

    # --- a training state -----------------------------------------------------------------

    def saved(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """The training state to save for that of this rank; every rank calls this.

        Sends names and shapes, if ranks have optimizer state that the others do not have.
        """
        state = with_parameters(state, model, self.to_global, self.kept_whole)
        if self.kept_whole:
            local_names = [name for name, is_here in self.kept_whole.items() if is_here]
            known = known_to_all(state["optimizer"]["state"], local_names, self.comm)
            groups = state["optimizer"]["param_groups"]
            _set_states(state, known, [name for group in groups for name in group["params"]])
        return state

    def loaded(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """The inverse: what this rank loads of a saved state. No communication."""
        return with_parameters(state, model, self.to_local, self.kept_whole)

    # --- what others ask ------------------------------------------------------------------

    def full_shapes(self, model: nn.Module) -> dict[int, torch.Size]:
        """The full shapes of the parameters that are cut, by the `id` of the part."""
        return {id(p): self.cuts[n].shape for n, p in model.named_parameters() if n in self.cuts}

    def weight_parts(self, model: nn.Module) -> dict[int, WeightParts]:
        """How these are cut, by the `id` of the part."""
        size, named = self.comm.size, model.named_parameters()
        return {id(p): self.cuts[n].parts(size) for n, p in named if n in self.cuts}

    def placed(self, rows: Iterable[Placed]) -> list[Placed]:
        """The placement of tensors, with the full shapes of parts."""
        full = {name: tuple(cut.shape) for name, cut in self.cuts.items()}
        return [
            replace(row, whole=full[row.name])
            if full.get(row.name, row.shape) != row.shape
            else row
            for row in rows
        ]


class StageLayout(Layout):
    """This rank holds the parameters in `local_names`, cut as in `parts`, and others on meta.

    The ranks of `line` hold a model together; `home` is the rank there that broadcasts a parameter.
    """

    def __init__(
        self, parts: Layout, line: Comm, home: Mapping[str, int], local_names: Iterable[str]
    ) -> None:
        super().__init__(parts.comm, parts.cuts, parts.mesh, parts.gather)
        self.line, self.home, self.local_names = line, home, set(local_names)

    def to_local(self, name: str, saved: Tensor) -> Tensor:
        if not isinstance(saved, DTensor) and name not in self.local_names:
            saved = torch.empty_like(saved, device="meta")
        return super().to_local(name, saved)

    def full(self, name: str, tensor: Tensor) -> Tensor:
        """Gathered from its parts on its home, then broadcast along the line."""
        home = self.home[name]
        if self.line.size == 1:
            return super().full(name, tensor)
        if home == self.line.rank:
            full = super().full(name, tensor).detach().contiguous()
        else:
            shape = self.full_like(name, tensor).shape
            full = torch.empty(shape, dtype=tensor.dtype, device=self.line.device)
        self.line.broadcast(full, source=home)
        return full

    def saved(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        state = super().saved(state, model)
        states = state["optimizer"]["state"]
        home_names = [name for name in states if self.home[name] == self.line.rank]
        known = known_to_all(self._local(states), home_names, self.line)
        _set_states(state, known, [name for name, _ in model.named_parameters()])
        return state

    def loaded(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        optimizer = state["optimizer"]
        optimizer = {**optimizer, "state": self._local(optimizer["state"])}
        return super().loaded({**state, "optimizer": optimizer}, model)

    def _local(self, states: dict[str, Any]) -> dict[str, Any]:
        return {name: values for name, values in states.items() if name in self.local_names}

    def placed(self, rows: Iterable[Placed]) -> list[Placed]:
        return [row for row in super().placed(rows) if row.device != "meta"]


class UnitLayout(Layout):
    """The parameters of `model` are DTensors of `fully_shard`, perhaps on the host."""

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        cuts: Mapping[str, Cut] = NO_CUTS,
        mesh: DeviceMesh | None = None,
        gather: Gather | None = None,
    ) -> None:
        super().__init__(comm, cuts, mesh, gather)
        self.model = model

    def to_local(self, name: str, saved: Tensor) -> Tensor:
        like = self.model.get_parameter(name)
        if isinstance(saved, DTensor) or not isinstance(like, DTensor):
            return saved
        return distribute_tensor(saved, like.device_mesh, like.placements, src_data_rank=None)

    def full(self, name: str, tensor: Tensor) -> Tensor:
        return super().full(name, tensor.to(self.comm.device))  # where ranks exchange it


class TwoAxes(UnitLayout):
    """Weights that are cut twice: layers over the tensor axis, and each part by rows over shards.

    `fully_shard` knows only the second cut: its DTensors are parts of parts. A state has DTensors
    over both axes, tensor first, so that any other strategy can load it. On 2 x 2 ranks, for a
    weight of 8 rows that is cut by rows twice:

        tensor 0: shard 0 has rows 0-1, shard 1 rows 2-3      tensor 1: rows 4-5, rows 6-7
    """

    def to_global(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or self.mesh is None:
            return tensor
        along = self.cuts[name].along if name in self.cuts else None
        places: list[Placement] = [Replicate() if along is None else shard_of(along), Shard(0)]
        like = torch.empty(self.full_like(name, tensor).shape, device="meta")
        return dtensor(tensor.to_local(), self.mesh, places, like)

    def to_local(self, name: str, saved: Tensor) -> Tensor:
        like = self.model.get_parameter(name)
        if not isinstance(like, DTensor):
            return saved
        if isinstance(saved, DTensor):
            return dtensor(saved.to_local(), like.device_mesh, like.placements, like)
        return super().to_local(name, self.part(name, saved))

    def full(self, name: str, tensor: Tensor) -> Tensor:
        """Gathered over shards, then over the tensor axis."""
        part = whole(tensor.to(self.comm.device))
        return Layout.full(self, name, part) if isinstance(tensor, DTensor) else part


# --- places --------------------------------------------------------------------------------------
# The places of parameters in the modules of a model: (module, attribute).


ParameterPlace = tuple[nn.Module, str]


def places_of(*models: nn.Module) -> dict[str, list[ParameterPlace]]:
    """The places of each parameter, by its first name in the first of the models.

    Tied parameters have several.
    """
    names = {id(parameter): name for name, parameter in models[0].named_parameters()}
    places: dict[str, list[ParameterPlace]] = {}
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(names[id(parameter)], []).append((module, attribute))
    return places


@contextmanager
def exchanged_at(places: Sequence[ParameterPlace], tensors: Sequence[Any]) -> Iterator[None]:
    """Within, these tensors are in these places."""
    before = [module._parameters[attribute] for module, attribute in places]
    _put_at(places, tensors)
    try:
        yield
    finally:
        _put_at(places, before)


def _put_at(places: Sequence[ParameterPlace], tensors: Sequence[Any]) -> None:
    for (module, attribute), tensor in zip(places, tensors, strict=True):
        module._parameters[attribute] = tensor


# --- training states -----------------------------------------------------------------------------
# Which tensors of a state follow parameters, and which ranks have them.


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


def _set_states(state: dict[str, Any], known: dict[str, Any], order: Iterable[str]) -> None:
    """Set the optimizer state of parameters, in this order."""
    ordered = {name: known[name] for name in order if name in known}
    state["optimizer"] = {**state["optimizer"], "state": ordered}


# --- dtensors ------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, of which ranks may hold parts; all of those ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put_whole(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into `target`: its part of it, if it is a part. No communication."""
    if not isinstance(target, DTensor):
        reals(target).copy_(value)
        return
    mesh, placements = target.device_mesh, target.placements
    placed = distribute_tensor(value, mesh, placements, src_data_rank=None)
    target.to_local().copy_(placed.to_local())


def mesh_of(
    comm: Comm,
    axes: Sequence[tuple[str, Comm]],
    kinds: Mapping[str, str] = MappingProxyType({}),
    grid: Tensor | None = None,
) -> DeviceMesh:
    """The ranks of `comm` as a mesh of these axes; each of them calls this.

    Each axis counts what torch sends there, as `control` or by `kinds`. `grid` has the ranks of
    several axes, by default with the last axis varying fastest.
    """
    groups: Any = [axis.counting_group(kinds.get(name, "control")) for name, axis in axes]
    if len(axes) == 1:
        groups = groups[0]  # torch asks it for its ranks
    elif grid is None:
        grid = ranks_of(comm).view([axis.size for _, axis in axes])
    names = tuple(name for name, _ in axes)
    return mesh_over(groups, comm.device.type, grid, names)


def ranks_of(comm: Comm) -> Tensor:
    """The ranks of `comm` in the job."""
    return torch.tensor(comm.members or range(comm.size))


def mesh_over(groups: Any, device: str, grid: Tensor | None, names: tuple[str, ...]) -> DeviceMesh:
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
