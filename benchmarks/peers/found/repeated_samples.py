"""torch 2.13.0: with DistributedSampler some samples count twice where they do not come out even.

It says so in its documentation; what it costs is easy to miss. Two ranks share 5 samples: the first
one comes twice. Prints by how much the gradient of DistributedDataParallel differs from the mean.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank: int, store: str) -> None:
    """One pass over all samples, on one of two ranks."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    data, module = torch.randn(5, 3), nn.Linear(3, 1)
    module(data).square().mean().backward()
    wanted = module.weight.grad.clone()
    module.zero_grad()
    model, sampler = DistributedDataParallel(module), DistributedSampler(data, shuffle=False)
    for batch in DataLoader(data, batch_size=3, sampler=sampler):
        model(batch).square().mean().backward()
    difference = ((module.weight.grad - wanted).norm() / wanted.norm()).item()
    if rank == 0:
        print(f"6 samples are counted of 5, and the gradient differs by {difference:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    start_processes(train, (f"file://{tempfile.mkdtemp()}/store",), nprocs=2, start_method="fork")
