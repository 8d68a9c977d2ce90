"""No exchange at all: each rank trains alone, on its own shards. The upper bound of throughput.

Rank r does what `single` would do on a data set of the samples of its shards. Ranks that draw
apart are the point; nobody should mistake this for training together.
"""

from __future__ import annotations

from allranks.torch.data.batch import Batch
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy


class Independent(Strategy):
    """Forward, backward, update, on every rank for itself. Nothing is sent."""

    name = "independent"
    can_run_ahead = True

    def reads_at_once(self, batch: Batch) -> bool:
        return not batch.own_samples

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.step.parameters)
