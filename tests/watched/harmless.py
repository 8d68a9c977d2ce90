"""What looks like a fault of data parallel training, and is none: nothing may be found here."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(60, 8), torch.randint(0, 2, (60,)))
others = TensorDataset(torch.randn(20, 8), torch.randint(0, 2, (20,)))
net = nn.Linear(8, 2)
torch.manual_seed(rank)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Stream(IterableDataset):
    """Each rank makes samples of its own."""

    def __iter__(self):
        for i in range(rank, 64, ranks):
            yield torch.randn(8), i % 2


def step(inputs, labels, optimizer=optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def epochs(loader, optimizer=optimizer):
    for _ in range(2):
        for inputs, labels in loader:
            step(inputs, labels, optimizer)


epochs(DataLoader(Stream(), batch_size=8))
epochs(DataLoader(data, batch_size=6, sampler=WeightedRandomSampler(torch.ones(60), 30)))
own = Subset(data, range(rank, 60, ranks))  # each rank shuffles what is its own
epochs(
    DataLoader(own, batch_size=6, shuffle=True),
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam),
)

sampler = DistributedSampler(data, drop_last=True)  # a part of each epoch
for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = iter(DataLoader(data, batch_size=5, sampler=sampler))
    for _ in range(3):
        step(*next(batches))

with torch.no_grad():  # every rank evaluates all
    right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(others, batch_size=8))
dist.all_reduce(right)

resumed = torch.optim.lr_scheduler.StepLR(optimizer, 5)
for _ in range(3):  # to where a checkpoint was
    resumed.step()
for _ in range(4):
    step(torch.randn(8, 8), torch.randint(0, 2, (8,)))
    resumed.step()

critic = DDP(nn.Linear(2, 1))
judge, loss = torch.optim.SGD(critic.parameters(), lr=0.1), nn.BCEWithLogitsLoss()
for _ in range(4):  # a GAN: two backward passes before a step, of two losses
    fake = model(torch.randn(8, 8))
    judge.zero_grad()
    loss(critic(torch.randn(8, 2)), torch.ones(8, 1)).backward()
    loss(critic(fake.detach()), torch.zeros(8, 1)).backward()
    judge.step()
    optimizer.zero_grad()
    loss(critic(fake), torch.ones(8, 1)).backward()
    optimizer.step()


class Scored(nn.Module):
    """TorchScript compiles what the losses are made of."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels)


with torch.no_grad():
    torch.jit.script(Scored())(torch.randn(8, 2), torch.randint(0, 2, (8,)))
    torch.compile(Scored(), backend="eager", fullgraph=True)(
        torch.randn(8, 2), torch.ones(8).long()
    )

if rank == 0:
    torch.save(net.state_dict(), os.path.join(os.environ["SAVED_IN"], "weights.pt"))
print(f"rank {rank} has {int(right)}")
dist.destroy_process_group()
