"""A script of the days of `torch.distributed.launch`: its local rank is an argument."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
assert args.local_rank == int(os.environ["LOCAL_RANK"])

dist.init_process_group("gloo", init_method="env://")
weight = torch.zeros(4, requires_grad=True)
torch.manual_seed(dist.get_rank())
inputs = torch.randn(32, 4)
losses = []
for _ in range(args.steps):
    loss = ((inputs @ weight - inputs.sum(dim=1)) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(gradient)
    with torch.no_grad():
        weight -= 0.1 * gradient / dist.get_world_size()
    losses.append(loss.item())
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: "
    f"loss {losses[0]:.6f} -> {losses[-1]:.6f}",
    flush=True,
)
dist.destroy_process_group()
