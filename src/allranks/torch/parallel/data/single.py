"""One process trains on the whole global batch: the reference for every other strategy.

With `--bitwise` each shard is a pass of its own, and shard gradients are added along the fixed
tree, exactly as the ranks of `ddp:reduce=tree` add them.
"""

from __future__ import annotations

import torch

from allranks.torch.data.batch import Batch
from allranks.torch.parallel.data.tree import TreeSum
from allranks.torch.step.gradients import Gradients, all_gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy


class Single(Strategy):
    """Forward, backward, update. Sends nothing."""

    can_run_ahead = has_whole_passes = True

    def forward_backward(self, batch: Batch) -> Tally:
        return self._along_the_tree(batch) if self.shard_alone else super().forward_backward(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.step.parameters, exact=self.shard_alone)

    def _along_the_tree(self, batch: Batch) -> Tally:
        """Leave in `.grad` the sum of the shards' gradients; returns the sum of their tallies."""
        step, tree, tally = self.step, TreeSum(self.task.shards), self.step.layout.tally()
        self._to_zeros()
        for leaf in step.leaves(batch, tally):
            gradients = all_gradients(step.parameters)
            tree.add((leaf.shards.start, leaf.shards.stop), [*gradients, tally.tensor])
            self._to_zeros()
            tally.tensor.zero_()
        *gradients, total = tree.total()
        for parameter, gradient in zip(step.parameters, gradients, strict=True):
            parameter.grad = gradient
        return step.layout.tally(total)

    def _to_zeros(self) -> None:
        """As buckets begin: a gradient that is accumulated into zeros has no -0.0."""
        for parameter in self.step.parameters:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
