"""The same training with Lightning Fabric, as in its guide."""

from __future__ import annotations

import os

from lightning_fabric import Fabric

from allranks.programs.peers.given import Notes, asked, leave, main
from allranks.programs.peers.torch_task import TorchTask


def train() -> None:
    """From the first step to the last."""
    job, folder = asked()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=devices, num_nodes=job.nodes)
    fabric.launch()
    rank, ranks = fabric.global_rank, fabric.world_size
    given, notes = TorchTask(job), Notes(folder, rank)
    plain = given.model()
    model, optimizer = fabric.setup(plain, given.optimizer(plain))
    for batch in given.batches(rank, ranks):
        optimizer.zero_grad()
        loss = given.loss(model, batch, ranks)
        fabric.backward(loss)
        optimizer.step()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        notes.step(mean.item(), batch[1])
    notes.close()
    fabric.barrier()
    leave()


if __name__ == "__main__":
    main(train)
