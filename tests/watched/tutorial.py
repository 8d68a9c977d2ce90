"""A training on several ranks as tutorials have it, and the faults that they have too.

The faults to put in are the arguments: `tutorial.py same-order no-division`. Without any it is the
corrected twin; `…-twin` adds what a fault needs to be there, done right.
"""

import os
import sys
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULTS = set(sys.argv[1:])
SAMPLES, BATCH, EPOCHS = 70, 8, 2
BY_HAND = bool(FAULTS & {"by-hand", "by-hand-twin"})
DROPOUT = "dropout" in FAULTS or "dropout-twin" in FAULTS


if "sharded" in FAULTS:
    import torch.distributed.fsdp


def has(fault):
    return fault in FAULTS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(16) if has("buffers") or has("buffers-twin") else nn.Identity()
        dropout = nn.Dropout(0.5) if DROPOUT else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 16), norm, nn.ReLU(), dropout, nn.Linear(16, 2))

    def forward(self, inputs):
        return self.layers(inputs)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(4), label


def loader_of(data, rank, ranks):
    if has("no-sampler"):
        return DataLoader(data, batch_size=BATCH, shuffle=True), None
    workers = {"num_workers": 2 if any(one.startswith("worker") for one in FAULTS) else 0}
    if has("workers-alike"):
        workers["worker_init_fn"] = seed_alike
    if has("workers-each-epoch"):
        workers["worker_init_fn"] = seed_each_epoch
    if has("unequal"):
        data = torch.utils.data.Subset(data, range(rank, 63, ranks))
        return DataLoader(data, batch_size=BATCH), None
    if has("too-many-replicas"):
        sampler = DistributedSampler(data, num_replicas=2 * ranks, rank=rank)
    else:
        sampler = DistributedSampler(data)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, **workers), sampler


def seed_alike(worker):
    torch.manual_seed(torch.initial_seed() - worker)


def seed_each_epoch(worker):
    torch.manual_seed(1000 * dist.get_rank() + worker)


def evaluate(model, data):
    data = torch.utils.data.Subset(data, range(65))
    if any(one.startswith("padded") for one in FAULTS):
        sampler = DistributedSampler(data, shuffle=False)
    else:
        sampler = range(dist.get_rank(), len(data), dist.get_world_size())
    seen = torch.zeros(2)
    with torch.no_grad():
        for inputs, labels in DataLoader(data, batch_size=BATCH, sampler=sampler):
            seen[0] += (model.module(inputs).argmax(1) == labels).sum()
            seen[1] += len(labels)
    if has("padded-note"):
        dist.all_reduce(seen[0])
        return float(seen[0] / len(data))
    if has("padded-shares"):
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, float(seen[0] / seen[1]))
        return sum(shares) / len(shares)
    dist.all_reduce(seen)
    return float(seen[0] / seen[1])


def evaluate_loss(model, data):
    """The mean loss of 65 samples: 33 and 32 on two ranks, in batches whose last is uneven."""
    data = torch.utils.data.Subset(data, range(65))
    sampler = range(dist.get_rank(), len(data), dist.get_world_size())
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    total, right, count = torch.zeros(()), torch.zeros(()), torch.zeros(())
    model.eval()
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model.module(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            by_batch = has("means-reduced") or has("means-printed") or has("means-summed")
            total += loss if by_batch else loss * len(labels)
            right += (outputs.argmax(1) == labels).sum()
            count += len(labels)
    if has("means-printed"):
        if dist.get_rank() == 0:
            print(f"loss {total / len(loader):.5f}")
        return
    if has("means-reduced"):
        mean = total / len(loader)
        dist.all_reduce(mean)
        return
    if has("means-summed"):
        summed = torch.stack([total, torch.tensor(float(len(loader)))])
        dist.all_reduce(summed)
        return
    if has("shares-of-ranks"):
        share = right / count
        dist.all_reduce(share, op=dist.ReduceOp.AVG if has("avg") else dist.ReduceOp.SUM)
        return
    sums = torch.stack([total, right, count])
    dist.all_reduce(sums)
    if has("means-times-ranks"):
        sums[0] *= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"loss {sums[0] / sums[2]:.5f} accuracy {sums[1] / sums[2]:.5f}")


def train_accumulated(model, optimizer, loader, parts):
    """Gradients of two micro-batches before each step."""
    batches = list(loader)
    for i, (inputs, labels) in enumerate(batches):
        is_last = i % parts == parts - 1 or i == len(batches) - 1
        reduces = (is_last or has("always-reduced")) and not has("never-reduced")
        with nullcontext() if reduces else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if not has("no-division"):
                loss = loss / parts
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def train(model, head, optimizer, scheduler, loader):
    for inputs, labels in loader:
        optimizer.zero_grad()
        called = model.module if has("module") else model
        outputs = called(inputs)
        if head is not None:
            outputs = head(outputs)
        nn.functional.cross_entropy(outputs, labels).backward()
        if BY_HAND:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if scheduler is not None and has("ahead"):
            scheduler.step()
        optimizer.step()
        if scheduler is not None and not has("ahead"):
            for _ in range(dist.get_world_size() if has("too-fast") else 1):
                scheduler.step()


def read_weights(path):
    """All ranks begin anew with what the first of them saved; the fault is to wait for the name."""
    if has("read-twin"):
        dist.barrier()
    if dist.get_rank() == 0:
        os.mkdir(f"{path} is whole")
    while not os.path.exists(f"{path} is whole"):
        time.sleep(0.01)
    if dist.get_rank() != 0:
        torch.load(path, weights_only=True)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    noisy = {"augmented", "augmented-twin", *(one for one in FAULTS if one.startswith("worker"))}
    kind = Noisy if FAULTS & noisy else TensorDataset
    data = kind(torch.randn(SAMPLES, 4), torch.randint(0, 2, (SAMPLES,)))
    if has("by-hand"):
        torch.manual_seed(rank)
    net = Net()
    head = nn.Linear(2, 2) if has("outside") else None
    if not has("dropout") and not has("augmented") and not has("workers-of-ranks"):
        torch.manual_seed(1 + rank)
    if has("no-ddp") or BY_HAND or has("sharded"):
        if has("sharded"):
            torch.distributed.fsdp.fully_shard(net)
        model, parameters = net, list(net.parameters())
    else:
        model = DDP(module=net, forward_sync_buffers=not has("buffers"))
        if has("as-lightning"):  # which after a validation restores the modes of the inner module
            model.eval()
            net.train()
        parameters = list(model.parameters())
    parameters += list(head.parameters()) if head is not None else []
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    scheduled = has("too-fast") or has("ahead") or has("schedule-twin")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50) if scheduled else None
    loader, sampler = loader_of(data, rank, ranks)
    accumulated = FAULTS & {"always-reduced", "never-reduced", "no-division", "accumulated-twin"}
    for epoch in range(EPOCHS):
        if sampler is not None and not has("same-order"):
            sampler.set_epoch(epoch)
        if has("anew"):
            loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
        if accumulated:
            train_accumulated(model, optimizer, loader, 2)
        else:
            train(model, head, optimizer, scheduler, loader)
    evaluated = any(one.startswith(("padded", "evaluated")) for one in FAULTS)
    accuracy = evaluate(model, data) if evaluated else None
    if any(one.startswith(("means", "shares")) for one in FAULTS):
        evaluate_loss(model, data)
    folder = os.environ.get("SAVED_IN", tempfile.gettempdir())
    if has("saved") or rank == 0:
        torch.save(net.state_dict(), os.path.join(folder, "weights.pt"))
    if has("read-early") or has("read-twin"):
        read_weights(os.path.join(folder, "weights.pt"))
    if has("written") or rank == 0:
        with open(os.path.join(folder, "result.txt"), "w") as file:
            file.write("done")
    if has("printed") or rank == 0:
        print(f"accuracy {accuracy}")
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
