"""Accelerate: the loop of one device, with `prepare` and `accelerator.backward`."""

import socket

import torch
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    loader = DataLoader(
        TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).tanh()), batch_size=32, shuffle=True
    )
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(8):
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes} "
        f"on {socket.gethostname()}: loss {losses[0]:.6f} -> {losses[-1]:.6f}",
        flush=True,
    )
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
