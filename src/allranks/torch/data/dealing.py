"""Deals the shards of a batch to the ranks that read data, as `--share` says.

Numbers and names are dealt once, before the first step. With `--share auto` each step tells all
ranks how long each of them worked (`Stopwatch`), so that all deal alike, without a message.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from statistics import median

from allranks.job.job import AUTO, Job
from allranks.launcher.heartbeat import Heartbeat
from allranks.strategies.shards import Shares
from allranks.strategies.shares import Dealing, check_share, shares_for
from allranks.torch.accelerator import chip_name
from allranks.torch.data.task_data import TaskData
from allranks.torch.step.tally import Stopwatch
from allranks.torch.strategies.base import Strategy
from allranks.training.progress import Progress


class Dealer:
    """The shares of one training; every rank makes one, and calls the same methods.

    The constructor gathers the `number` of each process in the job, and the names of hosts and
    devices, and raises `RequestError` for shares that cannot be. `report` is called on the leader
    for each table of shares. `seconds_before` are the `seconds` of this rank in the group before, 0
    if it is new: all deal by these from the first step on, and a new rank counts as the median.
    """

    def __init__(
        self,
        strategy: Strategy,
        job: Job,
        heartbeat: Heartbeat,
        number: int,
        report: Callable[..., None],
        seconds_before: float = 0.0,
    ) -> None:
        check_share(job.share, job.strategy_spec)
        self.strategy, self._report = strategy, report
        device = strategy.comm.device
        names = [socket.gethostname(), device.type, *filter(None, [chip_name(device)])]
        texts = strategy.data.gather_texts(json.dumps([number, names, seconds_before]))
        self._numbers, of_readers, seconds = zip(*map(json.loads, texts), strict=True)
        shares = shares_for(job.share, strategy.task.shards, of_readers)
        self._seconds_before = seconds_before
        self._dealing: Dealing | None = None
        self._next: Shares | None = None
        self._first: Shares | None = shares
        if job.share == AUTO and 1 < shares.ranks <= shares.shards:  # else nothing is to be dealt
            if known := [each for each in seconds if each]:
                usual = median(known)
                shares = Shares.by_speed(shares.shards, [each or usual for each in seconds])
            self._first, self._dealing = shares, Dealing(shares)
            self._watch = Stopwatch(heartbeat, strategy.data.rank, device)
            strategy.step.stopwatch = self._watch
        strategy.deal(shares)

    @property
    def seconds(self) -> float:
        """What a shard took this rank lately; 0 if that was not measured."""
        here = 0.0 if self._dealing is None else self._dealing.seconds_of(self.strategy.data.rank)
        return here or self._seconds_before

    def before_batch(self, data: TaskData, done: Progress) -> None:
        """Before the next batch is read: deal the shards anew, where the last step said so."""
        if self._first is not None:
            self._tell(done.batch_index, self._first, None)
            self._first = None
        if self._next is not None:
            shares, self._next = self._next, None
            self.strategy.deal(shares)
            data.deal(shares, done)
        if self._dealing is not None:
            self._watch.start()

    def after_step(self, done: Progress) -> None:
        """After a step: look at the seconds of all ranks."""
        if self._dealing is None:
            return
        self._next = self._dealing.after_step(self._watch.of_ranks)
        if self._next is not None:
            self._tell(done.batch_index, self._next, self._dealing.seconds_dealt_by)

    def _tell(self, step: int, shares: Shares, seconds: list[float] | None) -> None:
        if self.strategy.comm.rank == 0:
            values = {"shares": list(shares.counts), "seconds_per_shard": seconds}
            self._report("shares", step=step, ranks=self._numbers, **values)
