"""DTensors of what ranks hold parts of: for states, checkpoints and traces.

Loaded only where a job has some: importing their types takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
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

from allranks.torch.comm.comm import Comm
from allranks.torch.tensor_parallel.exchange import Along

__all__ = ["Replicate", "Shard", "device_mesh", "distribute_tensor", "dtensor", "mesh_of"]


def device_mesh(comm: Comm, axis: str) -> DeviceMesh:
    """The ranks of `comm` as a mesh of one axis; every one of them calls this.

    What torch sends there is counted by `comm`, as `control`.
    """
    group = comm.counting_group("control")
    return mesh_over(group, comm.device.type, None, (axis,))


def mesh_of(
    axes: Sequence[tuple[str, Comm]], ranks: int, kinds: Mapping[str, str] | None = None
) -> DeviceMesh:
    """All `ranks` of the job as a mesh of these axes; every one of them calls this.

    What torch sends there is counted by the axis, as `control` or what `kinds` say of it.
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
    """A mesh of a group, or of one for each axis of `grid`; every rank of them calls this.

    torch keeps of each operation on what mesh its result lies, and finds it again for any mesh with
    the same ranks: in a process that trained before, one whose groups are gone, or now others.
    """
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    return DeviceMesh.from_group(groups, device, grid, mesh_dim_names=names)


def shard_of(along: Along) -> Placement:
    """How a tensor that is cut so lies on the ranks."""
    return (
        Shard(along.dim) if along.runs == 1 else _StridedShard(along.dim, split_factor=along.runs)
    )


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor
) -> DTensor:
    """What this rank holds of a tensor that looks like `whole`, which may be on meta.

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
