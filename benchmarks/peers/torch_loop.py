"""A training with torch by each peer's public interface, one loop for all of them.

`allranks bench --peers` trains the task of a job with it (`train`), and `step.py` and
`strategies.py` time it (`contenders.py`). A class is a peer: how it wraps a model, derives a loss
and takes the mean over ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer_job import Notes, check_task, leave, shares
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch.data.open_data import open_data
from allranks.torch.data.sources import MapSource, TensorSource
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.task import Task
from allranks.training.task_fields import task_of

Batch = tuple[Any, int]
"""The samples of this rank, and how many all ranks have."""


class PeerLoop:
    """The loop of every tutorial; `prepare` makes its `model` and `optimizer`.

    By itself it talks over torch's group, as loops by hand do.
    """

    model: Any
    optimizer: Any
    batch = 1
    """The samples of a rank in a step, for a peer that wants to know."""

    def __init__(self, nodes: int = 1) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        """Wrap the model, and make its optimizer; every rank calls this."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def mean(self, loss: Tensor) -> float:
        """The mean of the losses of all ranks."""
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / self.ranks

    def barrier(self) -> None:
        dist.barrier()

    def train(
        self,
        batches: Iterable[Any],
        loss_of: Callable[[Any, Any], Tensor],
        note: Callable[[Tensor, Any], None],
    ) -> None:
        """A step for each batch; `note` gets the loss of this rank, and the batch."""
        for batch in batches:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch)
            self.backward(loss)
            self.optimizer.step()
            note(loss, batch)


class Hand(PeerLoop):
    """DistributedDataParallel, as in the tutorial of torch."""

    def __init__(self, nodes: int = 1, **options: Any) -> None:
        super().__init__(nodes)
        self.options = options

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        self.model = DistributedDataParallel(model, **self.options)
        self.optimizer = optimizer_of(self.model.module)


LOOPS = {
    "hand": "torch_loop:Hand",
    "accelerate": "with_accelerate:AccelerateLoop",
    "fabric": "with_fabric:FabricLoop",
    "deepspeed": "with_deepspeed:DeepSpeedLoop",
    "deepspeed-zero1": "with_deepspeed:DeepSpeedZero1",
}
"""The loops of `allranks bench`; a module is imported only for its own peer."""


class PeerTask:
    """The model, the optimizer, the batches and the loss of a job."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads or 1)
        self.job = job
        self.task = task_of(job, Task)
        check_task(self.task)
        source = open_data(self.task.train_data(), self.task, job.seed, 0, "train_data").source
        if not isinstance(source, (TensorSource, MapSource)):
            raise RequestError(
                asked="a peer",
                found="a stream, or a loader of its own",
                why="a peer reads samples by number",
                do="bench it without --peers",
            )
        self._source = source

    def model(self) -> nn.Module:
        """With the initial weights that allranks gives it."""
        seed_generators(self.job.seed)
        return self.task.model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.task.optimizer(model)

    def batches(self, rank: int, ranks: int) -> Iterator[Batch]:
        """The samples of one rank, step by step."""
        own, read = (shares(len(self._source), self.task, self.job, rank, ranks) for _ in range(2))
        batches = self._source.batches((share.epoch, share.numbers) for share in read)
        for share, batch in zip(own, batches, strict=True):
            yield batch, share.of_all

    def loss(self, model: Any, batch: Batch, ranks: int) -> Tensor:
        """What a rank derives: its part of the mean over all samples, times the ranks."""
        samples, of_all = batch
        inputs = self.task.inputs(samples)
        if isinstance(inputs, dict):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        losses = self.task.loss(output, samples)
        values = losses[0].numel() if len(losses) else 1
        return losses.sum() / (of_all * values) * ranks


def train(job: Job, folder: Path, peer: str) -> None:
    """From the first step to the last; rank 0 notes the mean loss of all ranks."""
    module, name = LOOPS[peer].split(":")
    loop: PeerLoop = getattr(importlib.import_module(module), name)(job.nodes)
    task, notes = PeerTask(job), Notes(folder, loop.rank)
    loop.batch = max(1, task.task.batch_size // loop.ranks)
    loop.prepare(task.model(), task.optimizer)
    loop.train(
        task.batches(loop.rank, loop.ranks),
        lambda model, batch: task.loss(model, batch, loop.ranks),
        lambda loss, batch: notes.step(loop.mean(loss), batch[1]),
    )
    notes.close()
    loop.barrier()
    leave()
