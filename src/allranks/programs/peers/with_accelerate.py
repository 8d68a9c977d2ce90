"""The same training with Accelerate, as in its guide."""

from __future__ import annotations

from accelerate import Accelerator

from allranks.programs.peers.given import Notes, asked, leave, main
from allranks.programs.peers.torch_task import TorchTask


def train() -> None:
    """From the first step to the last."""
    job, folder = asked()
    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    given, notes = TorchTask(job), Notes(folder, rank)
    plain = given.model()
    model, optimizer = accelerator.prepare(plain, given.optimizer(plain))
    for batch in given.batches(rank, ranks):
        optimizer.zero_grad()
        loss = given.loss(model, batch, ranks)
        accelerator.backward(loss)
        optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        notes.step(mean.item(), batch[1])
    notes.close()
    accelerator.wait_for_everyone()
    leave()


if __name__ == "__main__":
    main(train)
