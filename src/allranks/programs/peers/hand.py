"""A training with DistributedDataParallel, as a person writes it by hand."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allranks.programs.peers.given import Notes, asked, leave, main
from allranks.programs.peers.torch_task import TorchTask


def train() -> None:
    """From the first step to the last."""
    job, folder = asked()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given, notes = TorchTask(job), Notes(folder, rank)
    model = DistributedDataParallel(given.model())
    optimizer = given.optimizer(model.module)
    for batch in given.batches(rank, ranks):
        optimizer.zero_grad()
        loss = given.loss(model, batch, ranks)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        notes.step(mean.item() / ranks, batch[1])
    notes.close()
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(train)
