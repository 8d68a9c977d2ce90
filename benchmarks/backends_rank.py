"""A rank of `backends.py`: our Trainer with several strategies, over one backend."""

from __future__ import annotations

import gc
import os
import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from turns import answer_asked
from workloads import WORKLOADS, task_of

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.shared_memory.backend import outcome_of, register

STEPS_LIMIT = 10**9


class Rank:
    """Answers what `backends.py` asks about the trainers of this rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.made: dict[int, tuple[Trainer, Any]] = {}

    def answer(self, what: str, *details: Any) -> Any:
        return {"make": self.make, "losses": self.losses, "time": self.time}[what](*details)

    def make(self, number: int, workload: str, strategy: str) -> None:
        """The trainer of a setting."""
        task = task_of(WORKLOADS[workload], self.world.size, self.world.size)
        trainer = Trainer(task, Job(strategy=strategy), world=self.world)
        self.made[number] = trainer, trainer.batches(steps=STEPS_LIMIT)

    def losses(self, number: int, steps: int) -> list[float]:
        """The losses of the next steps."""
        trainer, batches = self.made[number]
        losses = [trainer.step(batch).loss for batch in islice(batches, steps)]
        gc.collect()
        gc.freeze()
        return losses

    def time(self, number: int, steps: int) -> list[float]:
        """Seconds of a step, over a block that begins at a barrier and ends with the last row."""
        trainer, batches = self.made[number]
        dist.barrier()
        start = time.perf_counter()
        results = [trainer.step(batch) for batch in islice(batches, steps)]
        assert results[-1].loss == results[-1].loss
        return [(time.perf_counter() - start) / steps]


def serve(rank: int, ranks: int, address: str, store: str, backend: str) -> None:
    """Join the ranks on `backend`, and answer until nothing more is asked."""
    torch.set_num_threads(1)
    world = World(rank, ranks, rank, ranks, 0, store)
    os.environ.update(world.variables(), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    register()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    outcome = outcome_of()
    assert backend == "gloo" or (outcome is not None and outcome.did == backend), outcome
    own = Rank(world)
    answer_asked(address, rank, own.answer)
    for trainer, _ in own.made.values():
        trainer.close()
    dist.destroy_process_group()
