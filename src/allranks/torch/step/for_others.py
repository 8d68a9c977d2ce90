"""Passes through the model whose samples have no weight: where a pass communicates,
all ranks make it.

Under a strategy that cuts its weights (`Strategy.equal_passes`) a forward pass gathers them from
all ranks, and backward sums their gradients over all ranks. A rank that has fewer micro-batches
than another one, or no sample at all, goes through the model with the last micro-batch that it had,
and what that adds is multiplied by zero.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.nested import tensors_in
from allranks.torch.model.layers import Scope
from allranks.torch.step.apart import Apart


class Passing(Protocol):
    """What goes through the model: the step."""

    scope: Scope
    apart: Apart

    def output(self, batch: Batch, micro: MicroBatch) -> Any: ...

    def losses(
        self, batch: Batch, micro: MicroBatch, *, counts: bool
    ) -> tuple[Tensor, Tensor | None]: ...


class PassesForOthers:
    """The passes without weight of one rank. Their number is the batch's."""

    def __init__(self, step: Passing) -> None:
        self.step = step
        self._last: MicroBatch | None = None
        self._outputs: list[list[Tensor]] = []

    def begin(self, batch: Batch) -> None:
        """A step begins."""
        self._outputs = []
        if batch.passes and batch.micros:
            self._last = batch.micros[-1]

    def forward(self, batch: Batch) -> None:
        """The forward passes, where all of them come before any backward pass."""
        for _ in range(batch.passes_without_weight):
            with self.step.apart:
                output = self.step.output(batch, self._again(batch))
            self.step.scope.moments.clear()
            self._outputs.append([t for t in tensors_in(output) if t.requires_grad])

    def finish(self, batch: Batch) -> None:
        """The rest of the passes, after those of this rank's own samples."""
        for tensors in self._outputs:
            torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])
        for _ in range(batch.passes_without_weight - len(self._outputs)):
            losses, _ = self.step.losses(batch, self._again(batch), counts=False)
            total = losses.sum()
            total.backward(torch.zeros_like(total))
            self.step.scope.moments.clear()
        self._outputs = []

    def _again(self, batch: Batch) -> MicroBatch:
        if self._last is None:
            raise RequestError(
                asked="to train with weights that are cut over the ranks",
                found=f"no sample for this rank in step {batch.index}, and none before",
                why="it goes through the model with the others, and has nothing to go through with",
                do="use at least as many samples as shards, or fewer ranks",
            )
        return self._last
