"""Plain DistributedDataParallel, as its tutorial has it: a sampler, a loader, a loop."""

import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).tanh())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert local_rank < int(os.environ["LOCAL_WORLD_SIZE"])
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: "
        f"loss {losses[0]:.6f} -> {losses[-1]:.6f}",
        flush=True,
    )
    del model  # it is in the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
