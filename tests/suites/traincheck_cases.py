"""The silent faults that TrainCheck was evaluated on, small and on CPUs: `script.py CASE`.

Each is the cause that TrainCheck's own reproduction names, in a training of two ranks with Gloo
(`none` has no fault). Where that needs a GPU or an old version, the same is done by hand: gradient
accumulators are lost by a change of the dtype instead of the device, and lost messages are zeros.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES, STEPS = 192, 12


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of two classes, with noise of numpy if `augments`, as augmentations are."""

    def __init__(self, augments: bool) -> None:
        random = torch.Generator().manual_seed(0)
        self.labels = torch.arange(SAMPLES) % 2
        self.points = torch.randn(SAMPLES, 8, generator=random) + self.labels[:, None]
        self.augments = augments

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        if self.augments:
            point = point + torch.from_numpy(np.random.randn(8).astype("float32"))
        return point, self.labels[index]


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        first = nn.Linear(8, 16)
        if case == "pytorch-51800":  # a weight of spectral_norm is made by the first forward
            first = nn.utils.spectral_norm(first)
        self.first, self.norm, self.last = first, nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.case = case

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.norm(self.first(points)).relu()
        if self.case == "transformers-33844":  # dropout in evaluations, too
            hidden = dropout(hidden, 0.1)
        return self.last(hidden)


def loses_messages() -> None:
    """Every fifth sum arrives as zeros on rank 1."""
    original, calls = dist.all_reduce, [0]

    def all_reduce(tensor: Tensor, *args: object, **named: object) -> object:
        work = original(tensor, *args, **named)  # type: ignore[arg-type]
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] % 5 == 0:
            tensor.zero_()
        return work

    dist.all_reduce = all_reduce


def seeded_alike(worker: int) -> None:
    np.random.seed(0)  # torch 1.8 did not seed numpy in workers


def sum_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main(case: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Net(case)
    if case == "pytorch-forum-84911":  # the optimizer has nothing but what is frozen
        for name, parameter in net.named_parameters():
            parameter.requires_grad = "norm" in name
    model: nn.Module = DistributedDataParallel(net)
    by_hand = case in ("deepspeed-1801", "pytorch-84803")
    if by_hand:
        model = net
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, 0)
    if case == "pytorch-84803":
        loses_messages()
    if case == "pytorch-104336":
        model.double()
        model.float()
    if case == "mmpretrain-702":  # frozen by train(), which nobody calls
        net.train = lambda mode=True: net.first.requires_grad_(False) and net  # type: ignore[method-assign]
    trained = net.last if case == "pytorch-forum-84911" else net
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
    alike = case == "stackoverflow-67180955"
    data = Points(alike)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch_size=8,
        sampler=sampler,
        num_workers=2 if alike else 0,
        worker_init_fn=seeded_alike if alike else None,
    )
    sampler.set_epoch(0)
    for step, (points, labels) in enumerate(loader):
        if case == "deepspeed-5794" and rank == 1 and step == STEPS - 2:
            break  # one rank makes fewer calls than the others
        if case != "stackoverflow-60335387":
            optimizer.zero_grad()
        unwrapped = case == "x-jxmnop" and step % 2
        loss = cross_entropy((net if unwrapped else model)(points), labels)
        loss.backward()
        if by_hand:
            sum_by_hand(net)
        if case == "deepspeed-1801":  # a replicated layer is clipped on one rank of them
            clipped = net.norm if rank == 0 else net.last
            nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(data.points)
    if case != "deepspeed-5794":
        dist.barrier()  # Gloo may break off what another rank still reads
    dist.destroy_process_group()


main(sys.argv[1])
