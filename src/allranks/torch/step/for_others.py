"""Passes through the model whose samples have no weight: where a pass communicates,
all ranks make it.

Under a strategy that cuts its weights (`Strategy.equal_passes`) a forward pass gathers them from
all ranks, and backward sums their gradients over all ranks. A rank that has fewer micro-batches
than another one goes through the model with its last one again, and a rank that has no sample with
the `spare` one of the batch. The gradient of what the model returns is zero then, exactly, whatever
the loss is: a loss of infinity brings in nothing.

Zero times a derivative that is infinite inside the model is NaN all the same. Samples of the batch
itself are part of the step: where they are not finite, neither is the step, on any rank. Those that
a rank has read last of a stream that has ended are not. So a strategy that sums gradients itself,
within a pass, brings in zeros in place of what backward has found while `is_on`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.nested import copied, tensors_in
from allranks.torch.model.layers import Scope
from allranks.torch.step.apart import Apart


class Passing(Protocol):
    """What goes through the model: the step."""

    scope: Scope
    apart: Apart

    def output(self, batch: Batch, micro: MicroBatch) -> Any: ...

    def losses_of(self, output: Any, micro: MicroBatch) -> tuple[Tensor, Tensor | None]: ...


class PassesForOthers:
    """The passes without weight of one rank; with `equal_passes` as many as the batch says.

    `is_on` in forward and in backward of such a pass, and at no other time.
    """

    def __init__(self, step: Passing, equal_passes: bool = True) -> None:
        self.step, self.equal_passes = step, equal_passes
        self.is_on = False
        self._outputs: list[list[Tensor]] = []
        self._micro: MicroBatch | None = None

    def begin(self, batch: Batch) -> None:
        """A step begins."""
        self._outputs = []
        self._micro = _copy_of(_micro(batch)) if self._passes(batch) else None

    def forward(self, batch: Batch) -> Any:
        """The forward passes, where all of them come before any backward pass.

        Returns the output for the `spare` micro-batch of a rank without a sample.
        """
        output = None
        if batch.spare is not None and not self.equal_passes:  # only to know what the model returns
            with torch.no_grad(), self._forward():
                return self.step.output(batch, batch.spare)
        for _ in range(self._passes(batch)):
            with self._forward():
                output = self.step.output(batch, self._again())
            self._outputs.append(list(tensors_in(output)))
        return output

    def finish(self, batch: Batch, uses: list[bool] | None) -> None:
        """The rest of the passes, after those of this rank's own samples.

        `uses` says which tensors of the output a loss over the batch has used: backward goes
        through the same parts of the model as on all ranks.
        """
        for tensors in self._outputs:
            pairs = zip(tensors, uses or (), strict=True)
            used = [tensor for tensor, is_used in pairs if is_used and tensor.requires_grad]
            self._backward(used)
        for _ in range(self._passes(batch) - len(self._outputs)):
            with self._forward():
                micro = self._again()
                output = self.step.output(batch, micro)
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(torch.zeros_like)
                losses, _ = self.step.losses_of(output, micro)
            self._backward([losses])
        self._outputs = []

    def _again(self) -> MicroBatch:
        """What the next pass goes through the model with, which may write on it."""
        assert self._micro is not None
        return _copy_of(self._micro)

    def _passes(self, batch: Batch) -> int:
        return batch.passes_without_weight if self.equal_passes else 0

    def _backward(self, tensors: list[Tensor]) -> None:
        with self._is_on():
            torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Around a forward pass: nothing that it finds is counted."""
        with self.step.apart, self._is_on():
            yield
        self.step.scope.moments.clear()

    @contextmanager
    def _is_on(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


def _micro(batch: Batch) -> MicroBatch:
    """What this rank goes through the model with for the others."""
    micro = batch.micros[-1] if batch.micros else batch.spare
    assert micro is not None, "the data gives a rank without a sample a spare one"
    return micro


def _copy_of(micro: MicroBatch) -> MicroBatch:
    """The same with a copy of its data; where that cannot be copied, as it is."""
    try:
        return replace(micro, data=copied(micro.data))
    except RequestError:
        return micro
