"""FSDP2: `fully_shard` on each block and on the whole; parameters are sharded tensors."""

import socket

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    model.append(nn.Linear(16, 1))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    inputs = torch.randn(64, 16)
    target = inputs.mean(dim=1, keepdim=True)
    losses = []
    for _ in range(40):
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    host = socket.gethostname()
    print(f"rank {rank} of {size} on {host}: loss {losses[0]:.6f} -> {losses[-1]:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
