"""Accelerate 1.15.0: the last update of an epoch is too small where its window is shorter.

`backward` divides every loss by `gradient_accumulation_steps`, also where the loader ends before
so many batches have come. Here 5 batches come in windows of 4: the second window is one batch, and
its update a quarter of what one process makes of that batch. Prints the ratio.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = torch.randn(10, 3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
module = nn.Linear(3, 1)
optimizer = SGD(module.parameters(), lr=0.0)  # the weights stay, so that gradients can be compared
model, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(data, batch_size=2))
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        if accelerator.sync_gradients:
            made = module.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
module(data[8:]).square().mean().backward()
ratio = (made.norm() / module.weight.grad.norm()).item()
print(f"the gradient of the last window is {ratio:.3f} of the mean over its samples")
