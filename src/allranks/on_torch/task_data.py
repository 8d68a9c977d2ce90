"""The data of a task: opened when it is first needed, cut for this rank, the same on every rank."""

from __future__ import annotations

from typing import Any

from allranks.errors import RequestError
from allranks.job import Job
from allranks.on_torch.data import GlobalBatches
from allranks.on_torch.evaluate import evaluate, try_evaluation
from allranks.on_torch.loaders import WholeLoader
from allranks.on_torch.open_data import Opened, open_data
from allranks.on_torch.sources import MapSource, StreamSource, seed_generators
from allranks.on_torch.state import kept_random_streams
from allranks.on_torch.strategies.base import Strategy
from allranks.on_torch.task import Task
from allranks.shards import largest_shard
from allranks.training.course import check_metrics


class TaskData:
    """What one rank reads for one task under one strategy: its batches, and its evaluation data.

    `notes` say what is done otherwise than the task's data asks for, once that is open.
    """

    def __init__(self, task: Task, job: Job, strategy: Strategy) -> None:
        self.task, self.job, self.strategy = task, job, strategy
        self.notes: list[str] = []
        self._batches: GlobalBatches | None = None
        self._eval_source: Any = None

    @property
    def batches(self) -> GlobalBatches:
        """The global batches of the training, opened when they are first needed."""
        if self._batches is None:
            seed_generators(self.job.seed)  # a split drawn there is the same on every rank
            opened = self._opened(self.task.train_data(), "train_data")
            if isinstance(opened.source, StreamSource) and self.task.loss_over == "batch":
                raise RequestError(
                    asked='a stream with loss_over = "batch"',
                    found="nobody knows how many samples the other ranks have",
                    why="the outputs of all ranks are gathered, so their sizes must be known",
                    do="read the data as a map-style data set",
                )
            self._batches = GlobalBatches(
                source=opened.source,
                batch_size=self.task.batch_size,
                shards=self.task.shards,
                last_batch=self.task.last_batch,
                seed=self.job.seed,
                rank=self.strategy.data_rank,
                ranks=self.strategy.data_size,
                micro_batch=self.job.micro_batch,
                shard_alone=self.strategy.shard_alone,
                arithmetic=self.strategy.setting.arithmetic,
                prefetch=self.job.prefetch,
                order=opened.order,
            )
            if self._batches.note:
                self.notes.append(self._batches.note)
        return self._batches

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The metrics over `data`, or the task's own; leaves the random streams as they were."""
        with kept_random_streams(self.strategy.comm.device):
            source = self._evaluated() if data is None else self._eval_source_of(data)
            if source is None:
                return {}
            return evaluate(self.task, self.strategy, source, self._chunk)

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update.

        Sends a digest of what a loader draws, where the task hands in one that draws itself.
        """
        self._check_draws()
        source, names = self._evaluated(), dict[str, float]()
        if source is not None:
            names = try_evaluation(self.task, self.strategy, source, self._chunk)
        check_metrics(self.job, names)

    def close(self) -> None:
        """Let go of the data, and of the threads and processes that read it."""
        if self._batches is not None:
            self._batches.close()
        self._batches = self._eval_source = None

    @property
    def _chunk(self) -> int:
        return largest_shard(self.task.batch_size, self.task.shards)

    def _evaluated(self) -> Any:
        """The evaluation data of the task, opened when it is first needed; `None` if it has none."""
        if self._eval_source is None:
            seed_generators(self.job.seed)
            if (own := self.task.eval_data()) is not None:
                self._eval_source = self._eval_source_of(own)
        return self._eval_source

    def _eval_source_of(self, data: Any) -> Any:
        return self._opened(data, "eval_data").source

    def _opened(self, data: Any, name: str) -> Opened:
        opened = open_data(data, self.task, self.job.seed, self.job.loader_workers, name)
        if opened.note:
            self.notes.append(opened.note)
        return opened

    def _check_draws(self) -> None:
        """Raise where the data draws from what is not keyed, as far as its beginning shows it."""
        batches, comm = self.batches, self.strategy.comm
        if isinstance(batches.source, MapSource):
            batches.source.check_draws()
        drawing = batches.source if isinstance(batches.source, WholeLoader) else batches.order
        if drawing is None or comm.size == 1:
            return
        if len(set(comm.gather_texts(drawing.fingerprint()))) > 1:
            raise RequestError(
                asked="train_data() of the task: a DataLoader",
                found="its first epoch is not the same on all ranks",
                why="each takes its own part of what all draw, so all must draw the same",
                do="draw from torch's generator alone, or hand in the data set without a sampler",
            )
