"""What runs in the ranks of tests/on_torch/test_counting.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from allranks.errors import PeerLost
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.torch.comm.comm import CPU, Comm
from allranks.torch.comm.join import join


def what_torch_sends_itself(argument: None) -> None:
    """Collectives of torch's own parts on a counting group, and the bytes of each."""
    comm = join(World.from_environment(), CPU)
    group = comm.counting_group("outputs")
    before = 0.0

    def sent() -> float:
        nonlocal before
        now = comm.sent_bytes["outputs"]
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
    splits = [[0, 1, 2], [3, 0, 0], [0, 6, 0]]  # who gives whom how much
    given, own = sum(splits[comm.rank]), splits[comm.rank][comm.rank]
    taken = [row[comm.rank] for row in splits]
    dist.all_to_all_single(
        torch.empty(sum(taken)), six[:given], taken, splits[comm.rank], group=group
    )
    assert sent() == pytest.approx(4 * (given - own))
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


class Phases(Heartbeat):
    """Keeps the phases that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def enter(self, phase: str) -> str:
        self.told.append(phase)
        return super().enter(phase)


def _layer_on(comm: Comm) -> tuple[Any, torch.nn.Linear]:
    group = comm.counting_group("outputs")
    layer = torch.nn.Linear(4, 3, bias=False)
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(layer, mesh=mesh)
    return group, layer


def a_peer_goes_away(argument: None) -> None:
    """Rank 1 goes between forward and backward: the others say that they lost a peer."""
    heartbeat = Phases()
    comm = join(World.from_environment(), CPU, heartbeat)
    group, layer = _layer_on(comm)
    heartbeat.enter("compute")
    heartbeat.told.clear()
    output = layer(torch.ones(1, 4)).sum()
    assert heartbeat.told == ["exchange", "compute"], "one waits as in any other collective"
    comm.barrier()
    if comm.rank == 1:
        comm.leave(failed=True)
        return
    with pytest.raises(PeerLost):
        output.backward()  # FSDP2: torch waits in Python
    assert heartbeat.told[-1] == "exchange"
    tensor = distribute_tensor(
        torch.arange(6.0), DeviceMesh.from_group(group, "cpu"), [Shard(0)], src_data_rank=None
    )
    with pytest.raises(PeerLost):
        tensor.full_tensor()  # DTensor: torch waits in C++
    comm.leave(failed=True)


def all_groups_are_left(argument: None) -> None:
    """One training after the other in a process group of somebody else."""
    world = World.from_environment()
    store = dist.FileStore(world.store, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    left = []
    for _ in range(3):
        comm = join(world, CPU)
        pair = comm.subgroup((0, 1) if comm.rank < 2 else (2, 3))
        alone = comm.subgroup((comm.rank,))
        for one in (comm, pair, alone):
            group, layer = _layer_on(one)
            layer(torch.ones(1, 4)).sum().backward()
            assert dist.get_world_size(group) == one.size
        pair.all_reduce(torch.ones(1)).wait()
        comm.add_in_pair(torch.ones(1), comm.pair(comm.rank ^ 2)).wait()
        for one in (alone, pair, comm):
            one.leave()
        left.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(left)) == 1, left
    before = join(world, CPU)
    pair = before.subgroup((0, 1) if before.rank < 2 else (2, 3))
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("again", store),
        rank=world.rank,
        world_size=world.size,
    )
    pair.leave()  # of a process group that is gone: it is lent to nobody
    comm = join(world, CPU)
    pair = comm.subgroup((0, 1) if comm.rank < 2 else (2, 3))
    pair.all_reduce(torch.ones(1)).wait()
    pair.leave()
    comm.leave()
    dist.destroy_process_group()
