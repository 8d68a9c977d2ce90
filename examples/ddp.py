"""An ordinary script of DistributedDataParallel, with two mistakes that raise no error.

`allranks check -- python ddp.py` names both; `allranks run --ranks 2 -- python ddp.py` starts it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(2000, 2)
data = TensorDataset(points, (points.prod(dim=1) > 0).long())
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
model = DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}, loss {loss.item():.3f}")
dist.destroy_process_group()
