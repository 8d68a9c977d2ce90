"""Accelerate: `by_accelerate.py BATCH`; its loader reads one batch ahead."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=int(sys.argv[1]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch, target in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(batch), target))
        optimizer.step()
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
accelerator.end_training()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
