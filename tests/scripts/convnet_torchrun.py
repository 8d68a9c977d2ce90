"""A convolutional network as a computing centre shows it: torchrun's variables,
a sampler, argparse.

What stands for the data set are made-up digits, the same on every rank.
"""

import argparse
import os
import socket
from datetime import datetime

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.fc = nn.Linear(8 * 4 * 4, classes)

    def forward(self, x):
        return self.fc(self.layer1(x).flatten(1))


def dataset():
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(256) % 4
    images = torch.randn(256, 1, 8, 8, generator=generator) * 0.3
    for target in range(4):
        images[targets == target, :, 2 * target : 2 * target + 2] += 1.0
    return TensorDataset(images, targets)


def train(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    model = ConvNet().to(device)
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=False, sampler=sampler)
    start, losses = datetime.now(), []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            outputs = model(images.to(device, non_blocking=True))
            loss = criterion(outputs, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if rank == 0:
        print(f"training took {datetime.now() - start}")
    total = torch.tensor(losses[-1])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    assert torch.isfinite(total)
    print(
        f"rank {rank} of {world_size} on {socket.gethostname()}: "
        f"loss {losses[0]:.6f} -> {losses[-1]:.6f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", default=6, type=int, metavar="N")
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.02, type=float)
    args = parser.parse_args()
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
