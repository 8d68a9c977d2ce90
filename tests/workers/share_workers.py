"""Ranks whose shards are dealt anew before every step, in a loop of one's own."""

from __future__ import annotations

import random
from typing import Any

import contract_tasks
import foreign_tasks
import stateful_tasks
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.shards import Shares
from allranks.torch import Trainer
from allranks.torch.model.weights import weights_sha256

STEPS = 9
TASKS = {
    "images": contract_tasks.Images,
    "batch": contract_tasks.Pairs,
    "stream": contract_tasks.RandomStream,
    "stateful": stateful_tasks.Counted,
    "loader": foreign_tasks.AsAWhole,
    "buckets": foreign_tasks.InBuckets,
}


def digest(task: str, strategy: str, seed: int = 0, **job: Any) -> str:
    """The digest of `STEPS` steps; on several ranks each with shares of its own."""
    ranks = World.from_environment().size
    more = {"share": ",".join(["1"] * ranks)} if ranks > 1 else {}
    draws = random.Random(seed)
    with Trainer(TASKS[task](), Job(strategy=strategy, bitwise=True, **more, **job)) as trainer:
        for batch in trainer.batches(steps=STEPS):
            trainer.step(batch)
            if (dealer := trainer._dealer) is not None:
                readers = trainer.strategy.data.size
                weights = [draws.choice([1, 2, 5, 20]) for _ in range(readers)]
                if seed == 0:  # as many roots of the tree, and other ones
                    weights = [5, 3] if batch.index % 2 else [3, 5]
                dealer._next = Shares.by_weights(trainer.task.shards, weights)
        return weights_sha256(trainer.weights())


def dealt_anew(argument: dict[str, Any]) -> int:
    """In a rank: its weights at the end are those of one process."""
    wanted = argument.pop("wanted")
    assert digest(**argument) == wanted
    return 0
