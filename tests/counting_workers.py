"""What runs in the ranks of tests/on_torch/test_counting.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from allranks.launcher.world import World
from allranks.torch.comm import CPU
from allranks.torch.joining import join


def what_torch_sends_itself(argument: None) -> None:
    """Collectives of torch's own parts on a counting group, and the bytes of each."""
    comm = join(World.from_environment(), CPU)
    group = comm.counting_group("outputs")
    before = 0.0

    def sent() -> float:
        nonlocal before
        now = comm.sent["outputs"]
        found, before = now - before, now
        return found

    six = torch.arange(6.0)  # 24 bytes
    dist.all_reduce(six, group=group)
    assert six.tolist() == [0, 3, 6, 9, 12, 15], "the sum of 3 ranks"
    assert sent() == 2 * 2 / 3 * 24
    whole = torch.empty(18)
    dist.all_gather_into_tensor(whole, six, group=group)
    assert sent() == 2 * 24
    dist.reduce_scatter_tensor(torch.empty(6), whole, group=group)
    assert sent() == 2 / 3 * 72
    dist.all_to_all_single(torch.empty(6), six, group=group)
    assert sent() == 2 / 3 * 24
    if comm.rank == 0:
        dist.send(six, 1, group=group)
    elif comm.rank == 1:
        dist.recv(six, 0, group=group)
    assert sent() == (24 if comm.rank == 0 else 0)

    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], src_data_rank=None)
    assert tensor.full_tensor().tolist() == [0, 1, 2, 3, 4, 5]
    assert sent() == 2 * 8  # each gives its 2 numbers to two
    layer = torch.nn.Linear(4, 3, bias=False)  # 48 bytes
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(1, 4)).sum().backward()
    assert sent() == 2 * 16 + 2 / 3 * 48  # gathered once, scattered once
    comm.leave()
