"""A script that was written for `mpirun`: its rank stands in the variables of Open MPI."""

import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
local_rank = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
assert 0 <= local_rank < int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)

torch.manual_seed(rank)
inputs = torch.randn(32, 4)
weight = torch.zeros(4)
losses = []
for _ in range(20):
    error = inputs @ weight - inputs.sum(dim=1)
    losses.append(error.square().mean().item())
    gradient = 2 * inputs.T @ error / len(inputs)
    dist.all_reduce(gradient)
    weight -= 0.1 * gradient / size
print(
    f"rank {rank} of {size} on {socket.gethostname()}: loss {losses[0]:.6f} -> {losses[-1]:.6f}",
    flush=True,
)
dist.destroy_process_group()
