"""A task of torch, as the peers that train with torch take it.

python -m allranks.programs.peers.torch_task JOB.json       what of it no peer does, in words
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.programs.peers.given import asked_job, check_task, main, shares
from allranks.torch.data.open_data import open_data
from allranks.torch.data.sources import MapSource, TensorSource, seed_generators
from allranks.torch.task import Task
from allranks.training.task_fields import task_of

Batch = tuple[Any, int]
"""The samples of this rank, and how many all ranks have."""


class TorchTask:
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

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """That of the task."""
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


if __name__ == "__main__":
    main(lambda: TorchTask(asked_job()))
