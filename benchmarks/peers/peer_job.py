"""The part of a bench that every peer shares: the samples of each step, and what a rank notes.

The samples of a step are those that allranks takes, in the same order and cut over the ranks in the
same way; they are read by the same reader. The mean is the peer's own: a rank's loss is the sum
over its samples, divided by the samples of the whole batch, times the ranks, since peers take the
mean over ranks. BatchNorm normalises over what a rank has, and dropout draws as the rank draws.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.training.order import Order
from allranks.training.record.phases import held_at_most
from allranks.training.task_fields import TaskFields

NOT_DONE = ("schedule", "regularizer", "plateau", "pretrained", "initialise", "weight", "augment")
FIELDS = ("clip_norm", "ema")


@dataclass(frozen=True)
class Share:
    """The samples of one rank in a step: their numbers, and how many all ranks have."""

    epoch: int
    numbers: Any
    of_all: int


def check_task(task: TaskFields) -> None:
    """Raise `RequestError` for a task that asks for more than a peer does."""
    found = [name for name in NOT_DONE if hasattr(task, name) and task.overrides(name)]
    found += [name for name in FIELDS if getattr(task, name) is not None]
    if found or task.loss_over != "sample":
        raise RequestError(
            asked="a peer",
            found=f"a task with {', '.join(found) or 'a loss over the whole batch'}",
            why="a peer takes its model, optimizer, samples and loss, and nothing else",
            do="bench it without --peers",
        )


def shares(samples: int, task: TaskFields, job: Job, rank: int, ranks: int) -> Iterator[Share]:
    """The share of one rank in each step of the job."""
    order = Order(samples, task.batch_size, job.seed, task.last_batch)
    steps = job.steps or order.steps_per_epoch * task.epochs
    for step in range(steps):
        epoch, within = divmod(step, order.steps_per_epoch)
        numbers = order.batch(epoch, within)
        sizes = even_sizes(len(numbers), task.shards)
        own = owned_shards(task.shards, ranks, rank)
        start = sum(sizes[: own.start])
        yield Share(epoch, numbers[start : start + sum(sizes[own.start : own.stop])], len(numbers))


class Notes:
    """What a rank writes down: after each step the mean loss of all ranks, on the first rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._step = folder, rank, 0
        self._file = open(folder / "steps.jsonl", "w") if rank == 0 else None

    def step(self, loss: float, samples: int) -> None:
        """Note a step that is over."""
        row = {"step": self._step, "loss": loss, "samples": samples, "monotonic": time.monotonic()}
        self._step += 1
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """With the most memory that this process held."""
        if self._file is not None:
            self._file.close()
        held = json.dumps(held_at_most().to_data())
        (self._folder / f"held-{self._rank}.json").write_text(held)


def leave() -> NoReturn:
    """End this process, once all ranks have met, as it stands.

    A DistributedDataParallel that has the last reference to a group of Gloo may wait, as it goes,
    for a thread of that group, which waits for Python's lock: then a rank never ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
