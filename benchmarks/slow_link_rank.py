"""A rank of `slow_link.py` on a simulated node: several trainings, of which one steps at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from sending_tasks import TASKS
from turns import answer_asked

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.comm.join import join

STEPS_LIMIT = 10**9


class Trainings:
    """One trainer for each method, all of one model, on the process group of this rank."""

    def __init__(self, world: World) -> None:
        self.world, self.made = world, dict[str, tuple[Trainer, Iterator[Any]]]()

    def make(self, model: str, methods: list[str]) -> dict[str, Any]:
        """Close those there are, and make others; every rank calls this. Sizes of the model."""
        for trainer, _ in self.made.values():
            trainer.close()
        self.made.clear()
        for method in methods:
            job = Job(strategy=method, ranks=self.world.size, nodes=self.world.size, witness="off")
            trainer = Trainer(TASKS[model](), job, world=self.world)
            self.made[method] = trainer, trainer.batches(steps=STEPS_LIMIT)
        module = next(iter(self.made.values()))[0].strategy.model
        return {"parameters": sum(p.numel() for p in module.parameters())}

    def time(self, method: str, steps: int) -> dict[str, Any]:
        """The seconds of so many steps together, and the bytes that this rank sent in them."""
        trainer, batches = self.made[method]
        before, start = sum(trainer.comm.sent_bytes.values()), time.perf_counter()
        for _ in range(steps):
            trainer.step(next(batches))
        seconds = time.perf_counter() - start
        sent = sum(trainer.comm.sent_bytes.values()) - before
        return {"seconds": seconds, "sent_bytes": sent}

    def answer(self, what: str, *values: Any) -> Any:
        return getattr(self, what)(*values)


def serve(address: str) -> int:
    """Meet the other ranks, and do what is asked at `address`."""
    torch.set_num_threads(1)
    world = World.from_environment()
    comm = join(world, torch.device("cpu"))
    trainings = Trainings(world)
    answer_asked(address, world.rank, trainings.answer)
    trainings.made.clear()
    comm.leave()
    return 0
