"""DTensors of what ranks hold parts of: for states, checkpoints and traces.

Loaded only where a job has some: importing their types takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from allranks.torch.comm import Comm

__all__ = ["Replicate", "Shard", "device_mesh", "distribute_tensor", "dtensor", "mesh_of"]


def device_mesh(comm: Comm, axis: str) -> DeviceMesh:
    """The ranks of `comm` as a mesh of one axis; every one of them calls this.

    What torch sends there is counted by `comm`, as `control`.
    """
    group = comm.counting_group("control")
    return DeviceMesh.from_group(group, comm.device.type, mesh_dim_names=(axis,))


def mesh_of(axes: Sequence[tuple[str, Comm]], ranks: int) -> DeviceMesh:
    """All `ranks` of the job as a mesh of these axes; every one of them calls this.

    What torch sends there is counted by the axis, as `control`.
    """
    groups = [comm.counting_group("control") for _, comm in axes]
    grid = torch.arange(ranks).view([comm.size for _, comm in axes])
    names = tuple(name for name, _ in axes)
    return DeviceMesh.from_group(groups, axes[0][1].device.type, grid, mesh_dim_names=names)


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
