"""An image classifier in the manner of a main.py that spawns its own workers, one for each device.

One process is started on each node; RANK and WORLD_SIZE count nodes then, and every number of a
worker follows from them. The images are made up.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # it keeps a group that is there when it is imported
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Image classification")
parser.add_argument("data", nargs="?", default="made-up", help="path to the images")
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--epochs", default=20, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int, help="of all workers of a node")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--world-size", default=-1, type=int, help="number of nodes")
parser.add_argument("--rank", default=-1, type=int, help="number of this node")
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--devices-per-node", default=2, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")


class Images(Dataset):
    """Classes are told by their brightness."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        target = index % 4
        return torch.randn(3, 8, 8, generator=generator) + target, target


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    if args.multiprocessing_distributed:
        args.world_size *= args.devices_per_node
        mp.spawn(main_worker, nprocs=args.devices_per_node, args=(args,))
    else:
        main_worker(0, args)


def main_worker(device, args):
    if args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.multiprocessing_distributed:
        args.rank = args.rank * args.devices_per_node + device
    dist.init_process_group(
        args.dist_backend, args.dist_url, world_size=args.world_size, rank=args.rank
    )
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    images = Images()
    sampler = DistributedSampler(images)
    batch_size = args.batch_size // args.devices_per_node
    loader = DataLoader(images, batch_size=batch_size, sampler=sampler, num_workers=args.workers)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses += train(loader, model, criterion, optimizer)
        scheduler.step()
    accuracy = validate(loader, model)
    assert accuracy > 0.4, accuracy
    if args.rank % args.devices_per_node == 0:
        torch.save({"state_dict": model.state_dict()}, f"checkpoint-{args.rank}.pth.tar")
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: "
        f"loss {losses[0]:.6f} -> {losses[-1]:.6f}",
        flush=True,
    )
    del model  # it is in the group
    dist.destroy_process_group()


def train(loader, model, criterion, optimizer):
    model.train()
    losses = []
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def validate(loader, model):
    """Accuracy over all workers."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, target in loader:
            counts += torch.tensor([(model(images).argmax(1) == target).sum(), len(target)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
