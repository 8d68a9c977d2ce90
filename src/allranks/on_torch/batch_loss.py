"""A loss that couples samples (`loss_over = "batch"`): contrastive, mixture-of-experts balance.

The outputs and batches of all ranks are gathered, in shard order. Every rank computes the same
loss of the whole global batch, takes the gradient of its own rows, and sends it back through its
own forward passes, whose graphs are kept until then: a micro-batch bounds what goes through the
model at once here, not the memory. Sends an all-gather of outputs and batch (kind `outputs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.on_torch.arithmetic import Arithmetic
from allranks.on_torch.comm import Comm
from allranks.on_torch.data import Batch, MicroBatch
from allranks.on_torch.losses import weighted_losses
from allranks.on_torch.nested import concatenated, map_tensors, replaced, tensors_in
from allranks.on_torch.task import Task
from allranks.shards import owned_shards


class BatchLoss:
    """Prepares one step: forward passes, gathering, the loss; then gives micro-batches backward."""

    def __init__(self, task: Task, comm: Comm, arithmetic: Arithmetic) -> None:
        self.task, self.comm, self.arithmetic = task, comm, arithmetic
        self._empty: Any = None  # (output, data) of no samples, for a rank that has none

    def prepare(
        self, batch: Batch, forward: Callable[[MicroBatch], Any], loss_scale: float = 1.0
    ) -> Callable[[MicroBatch], tuple[Tensor, float, Callable[[], None]]]:
        """Run all forward passes and the loss of the whole batch.

        Returns a function that must be called once for each micro-batch, in order: it gives the
        sums of losses and weights of its rows, and what carries their gradient back.
        """
        outputs = [forward(micro) for micro in batch.micros]
        detached = [map_tensors(Tensor.detach, output) for output in outputs]
        own = concatenated([*zip(detached, (m.data for m in batch.micros), strict=True)])
        if own is not None:
            self._empty = map_tensors(lambda tensor: tensor[:0], own)
        elif self._empty is None:
            raise _no_sample(batch)
        whole, rows_before = self._gathered(batch, self._empty if own is None else own)
        output = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), whole[0])
        with torch.enable_grad():
            with self.arithmetic.context():
                losses, weights = weighted_losses(self.task, output, whole[1], batch.nominal)
            (losses.sum() * (loss_scale / batch.nominal)).backward()
        gradients = [tensor.grad for tensor in tensors_in(output)]
        waiting = deque(outputs)
        row = rows_before

        def take(micro: MicroBatch) -> tuple[Tensor, float, Callable[[], None]]:
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
            weight = own.numel() if weights is None else float(weights[rows].sum())
            return own.sum(), weight, backward

        return take

    def _gathered(self, batch: Batch, own: Any) -> tuple[Any, int]:
        """`own` of all ranks in shard order, and how many rows come before this rank's."""
        assert batch.sizes is not None
        shards = len(batch.sizes)
        rows = [
            sum(batch.sizes[k] for k in owned_shards(shards, self.comm.size, rank))
            for rank in range(self.comm.size)
        ]
        before = sum(rows[: self.comm.rank])
        if self.comm.size == 1:
            return own, before
        gathered = (self._gather_rows(tensor, rows) for tensor in tensors_in(own))
        return replaced(own, gathered), before

    def _gather_rows(self, own: Tensor, rows: list[int]) -> Tensor:
        """Rows of every rank, as bytes padded to the longest part: any type, any raggedness."""
        row_bytes = own[:0].new_empty((1, *own.shape[1:])).nbytes
        part = torch.zeros(max(rows) * row_bytes, dtype=torch.uint8, device=own.device)
        part[: own.nbytes] = own.contiguous().view(-1).view(torch.uint8)
        whole = part.new_empty(self.comm.size * part.numel())
        self.comm.all_gather(whole, part, "outputs").wait()
        parts = whole.view(self.comm.size, -1)
        flat = torch.cat([part[: n * row_bytes] for part, n in zip(parts, rows, strict=True)])
        return flat.view(own.dtype).view(sum(rows), *own.shape[1:])


def _no_sample(batch: Batch) -> RequestError:
    return RequestError(
        asked='loss_over = "batch"',
        found=f"{batch.nominal} samples in the first batch, so a rank has none",
        why="what the model returns is only known from a forward pass",
        do="use at least as many samples as shards, or fewer ranks",
    )
