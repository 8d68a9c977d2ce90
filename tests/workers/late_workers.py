"""What runs in the ranks of the tests of late gradients."""

from __future__ import annotations

import torch

import contract_tasks
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.data.batch import Batch
from allranks.torch.step.tally import Tally


def sums_under_way(argument: None) -> None:
    """Nobody has waited for a gradient before the forward and backward of the next step is over."""
    torch.set_num_threads(1)
    job = Job(strategy="ddp:late=1")
    with Trainer(contract_tasks.Images(), job, world=World.from_environment()) as trainer:
        strategy = trainer.strategy
        late, forward_backward = strategy.late, strategy.forward_backward  # type: ignore[attr-defined]
        seen: list[bool] = []

        def watched(batch: Batch) -> Tally:
            tally: Tally = forward_backward(batch)
            if late.on_its_way is not None:
                seen.append(late.on_its_way.whole is None and bool(under_way(late.on_its_way)))
            return tally

        strategy.forward_backward = watched  # type: ignore[method-assign]
        before = [parameter.detach().clone() for parameter in strategy.model.parameters()]
        for batch in trainer.batches(steps=4):
            trainer.step(batch)
            after = list(strategy.model.parameters())
            is_first = trainer.progress.batch_index == 1
            pairs = zip(before, after, strict=True)
            assert all(torch.equal(*pair) for pair in pairs) == is_first
        assert seen == [True] * 3


def under_way(gradient: object) -> list[object]:
    """The collectives of a gradient that nobody has waited for."""
    found: list[object] = gradient.buckets.reducer._under_way  # type: ignore[attr-defined]
    return found
