"""No exchange at all: each rank trains alone, on its own shards. The upper bound of throughput.

Rank r does what `single` would do on a data set of the samples of its shards. Ranks that draw
apart are the point; nobody should mistake this for training together.
"""

from __future__ import annotations

from allranks.torch.data.batches import Batch
from allranks.torch.strategies.base import Strategy
from allranks.training.progress import StepResult


class Independent(Strategy):
    """Forward, backward, update, on every rank for itself. Nothing is sent."""

    name = "independent"
    replicas_agree = False

    def train_step(self, batch: Batch) -> StepResult:
        for parameter in self.step.parameters:
            parameter.grad = None
        tally = self.step.layout.tally()
        self.step.accumulate(batch, lambda leaf: tally)
        return self.step.finish(batch, tally)
