"""The data of a task: opened when it is first needed, cut for this rank, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from allranks.errors import RequestError, nearest
from allranks.job import Job
from allranks.on_torch.data import GlobalBatches
from allranks.on_torch.evaluate import evaluate, try_evaluation
from allranks.on_torch.sources import StreamSource, seed_generators, source_of
from allranks.on_torch.state import kept_random_streams
from allranks.on_torch.strategies.base import Strategy
from allranks.on_torch.task import Task
from allranks.shards import largest_shard

FLOATING = {"fp32": torch.float32, "fp64": torch.float64}


class TaskData:
    """What one rank reads for one task under one strategy: its batches, and its evaluation data."""

    def __init__(self, task: Task, job: Job, strategy: Strategy) -> None:
        self.task, self.job, self.strategy = task, job, strategy
        self.floating = FLOATING[job.precision]
        self._batches: GlobalBatches | None = None
        self._eval_source: Any = None

    @property
    def batches(self) -> GlobalBatches:
        """The global batches of the training, opened when they are first needed."""
        if self._batches is None:
            seed_generators(self.job.seed)  # a split drawn there is the same on every rank
            source = self._source(self.task.train_data(), "train_data")
            if isinstance(source, StreamSource) and self.task.loss_over == "batch":
                raise RequestError(
                    asked='a stream with loss_over = "batch"',
                    found="nobody knows how many samples the other ranks have",
                    why="the outputs of all ranks are gathered, so their sizes must be known",
                    do="read the data as a map-style data set",
                )
            self._batches = GlobalBatches(
                source=source,
                batch_size=self.task.batch_size,
                shards=self.task.shards,
                last_batch=self.task.last_batch,
                seed=self.job.seed,
                rank=self.strategy.data_rank,
                ranks=self.strategy.data_size,
                micro_batch=self.job.micro_batch,
                shard_alone=self.strategy.shard_alone,
                device=self.strategy.comm.device,
                floating=self.floating,
            )
        return self._batches

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The metrics over `data`, or the task's own; leaves the random streams as they were."""
        with kept_random_streams(self.strategy.comm.device):
            source = self._evaluated() if data is None else self._source(data, "eval_data")
            if source is None:
                return {}
            return evaluate(self.task, self.strategy, source, self._chunk, self.floating)

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update."""
        _ = self.batches
        source, names = self._evaluated(), dict[str, float]()
        if source is not None:
            names = try_evaluation(self.task, self.strategy, source, self._chunk, self.floating)
        self._check_best(names)

    def close(self) -> None:
        """Let go of the data, and of the processes that read it."""
        self._batches = self._eval_source = None

    @property
    def _chunk(self) -> int:
        return largest_shard(self.task.batch_size, self.task.shards)

    def _evaluated(self) -> Any:
        """The evaluation data of the task, opened when it is first needed; `None` if it has none."""
        if self._eval_source is None:
            seed_generators(self.job.seed)
            if (own := self.task.eval_data()) is not None:
                self._eval_source = self._source(own, "eval_data")
        return self._eval_source

    def _source(self, data: Any, name: str) -> Any:
        source = source_of(data, self.task, self.job.seed, self.job.loader_workers, name)
        if isinstance(source, StreamSource) and name == "eval_data":
            raise RequestError(
                asked="eval_data() of the task",
                found="a stream",
                why="each sample is evaluated once, so how many there are must be known",
                do="return tensors or a map-style data set",
            )
        return source

    def _check_best(self, names: Iterable[str]) -> None:
        """Raise unless the evaluation has the metric by which the best checkpoint is kept."""
        metric = self.job.best.partition(":")[2]
        if self.job.best and metric not in names:
            raise RequestError(
                asked=f"--best {self.job.best}",
                found=f"no metric {metric!r} in the evaluation of this task",
                why="checkpoints are compared by what eval_data() and metrics() of the task give",
                do=nearest(metric, names),
            )
