"""A loss that couples samples (`loss_over = "batch"`): contrastive, mixture-of-experts balance.

The outputs and batches of all ranks are gathered, in shard order. Every rank computes the same
loss of the whole global batch, takes the gradient of its own rows, and sends it back through its
own forward passes, whose graphs are kept until then: a micro-batch bounds what goes through the
model at once here, not the memory. What is gathered, and what cannot be, is in `rows`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.comm import Comm
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.nested import map_tensors, tensors_in
from allranks.torch.data.rows import Rows, gathered, own_rows, rows_of_ranks
from allranks.torch.model.precision import Precision
from allranks.torch.step.losses import weighted_losses
from allranks.torch.task import Task

Taken = tuple[Tensor, float | Tensor, Callable[[], None]]
"""Of one micro-batch: the sum of its losses, of its weights, and what runs backward."""
Take = Callable[[MicroBatch], Taken]


class BatchLoss:
    """Prepares one step: forward passes, gathering, the loss; then gives micro-batches backward."""

    def __init__(self, task: Task, comm: Comm, precision: Precision) -> None:
        self.task, self.comm, self.precision = task, comm, precision
        self.uses: list[bool] = []  # of the tensors of the output, in the last step
        self.is_on = False  # while the task computes it

    def prepare(
        self,
        batch: Batch,
        forward: Callable[[MicroBatch], Any],
        after_forward: Callable[[], Any],
        loss_scale: float = 1.0,
    ) -> Take:
        """Run all forward passes, then `after_forward`, and the loss of the whole batch.

        A rank without a sample has its `batch.spare`, of which `after_forward` returns the output:
        it says what the rank has none of.
        Returns a function that must be called once for each micro-batch, in order: it gives the
        sums of losses and weights of its rows, and what carries their gradient back.
        """
        outputs = [forward(micro) for micro in batch.micros]
        spare = after_forward()
        detached = [map_tensors(Tensor.detach, output) for output in outputs or [spare]]
        whole, rows_before = self._whole(batch, detached)
        losses, weights, gradients = self._differentiated(whole, batch.nominal, loss_scale)
        self.uses = [gradient is not None for gradient in gradients]
        waiting = deque(outputs)
        row = rows_before

        def take(micro: MicroBatch) -> Taken:
            nonlocal row
            rows = slice(row, row + micro.samples)
            row += micro.samples
            pairs = [
                (tensor, gradient[rows])
                for tensor, gradient in zip(tensors_in(waiting.popleft()), gradients, strict=True)
                if gradient is not None and tensor.requires_grad
            ]

            def backward() -> None:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

            own = losses[rows].detach()
            weight = own.numel() if weights is None else weights[rows].sum()
            return own.sum(), weight, backward

        return take

    def _differentiated(
        self, whole: Any, samples: int, loss_scale: float
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """The losses of the whole batch, their weights, and the gradients of the output."""
        output = map_tensors(
            lambda t: t.requires_grad_(t.is_floating_point() or t.is_complex()), whole["output"]
        )
        with torch.enable_grad():
            self.is_on = True
            try:
                with self.precision.autocast():
                    losses, weights = weighted_losses(self.task, output, whole["batch"], samples)
            finally:
                self.is_on = False
            (losses.sum() * (loss_scale / samples)).backward()
        return losses, weights, [tensor.grad for tensor in tensors_in(output)]

    def _whole(self, batch: Batch, outputs: list[Any]) -> tuple[Any, int]:
        """All ranks' output and batch in shard order, and how many rows precede this rank's."""
        assert batch.sizes is not None
        rows = rows_of_ranks(batch.sizes, self.comm.size)
        before = sum(rows[: self.comm.rank])
        parts = [
            ({"output": output, "batch": micro.data}, micro.samples)
            for output, micro in zip(outputs, batch.to_read, strict=True)
        ]
        own = own_rows(parts)
        assert own is not None, "the data gives a rank without a sample a spare one"
        if isinstance(own, Rows):
            own = own if batch.micros else own.none_of_them()
        elif self.comm.size == 1 and len(parts) == 1:
            return parts[0][0], before  # nothing is put together
        whole = gathered(self.comm, own, rows)
        return whole.put_together(whole.tensors, whole.lists), before


def uses_a_parameter(name: str) -> RequestError:
    """What to say where the loss over a batch has a gradient for a weight by itself."""
    return RequestError(
        asked='loss(output, batch) of a task with loss_over = "batch"',
        found=f"it uses the parameter {name!r} itself",
        why="every rank computes this loss, so that gradient would count once for each",
        do="let the model return it with its output, one row for each sample",
    )
