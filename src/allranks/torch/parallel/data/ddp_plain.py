"""Data parallelism by definition: sum each gradient over all ranks, then step.

The specification of `ddp`: no buckets, no overlap, one message per parameter after backward. The
tally is sent with the last one.
"""

from __future__ import annotations

import torch

from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import reals
from allranks.torch.step.gradients import Gradients, all_gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy


class DDPPlain(Strategy):
    """All-reduce every gradient. Sends 2(N-1)/N of the gradients and the tally."""

    computes_alone = can_run_ahead = has_whole_passes = True

    def forward_backward(self, batch: Batch) -> Tally:
        for parameter in self.step.parameters:
            parameter.grad = torch.zeros_like(parameter)
        tally = self.step.layout.tally()
        self.step.accumulate(batch, tally)
        return tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        parameters = self.step.parameters
        *gradients, last = all_gradients(parameters)
        for gradient in gradients:
            self.comm.all_reduce(gradient).wait()
        numbers = reals(last)
        message = torch.cat([numbers.flatten(), local.tensor])
        self.comm.all_reduce(message).wait()
        numbers.copy_(message[: numbers.numel()].view_as(numbers))
        sums = self.step.layout.tally(message[numbers.numel() :])
        return sums, Gradients(parameters)
