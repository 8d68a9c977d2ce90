"""From a batch to the weighted losses of its samples, with what a task returns checked.

`forward` is called in every forward pass: by the shared step, by the loss over a batch, and by
evaluation.

`regularizer(model)` is added once, after the gradients of all ranks are summed. What a forward
pass has left on the model (the balance loss of a router) is that of one rank's last micro-batch. It
would not be the task's loss on any number of ranks, and ranks would drift apart. So the first
values are looked through. Every node that autograd makes has a number, counted up in its thread: a
node that is older than the call belongs to a forward pass. What has no node (a detached value)
differs between ranks, which the tally of the next step shows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.strategies.shards import Shares
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.collate import (
    BatchRows,
    gathered,
    map_tensors,
    own_rows,
    rows_of_ranks,
    tensors_in,
)
from allranks.torch.model.precision import Precision
from allranks.torch.task import Task

IGNORED = -100  # torch's cross_entropy leaves it out by default
ROUNDED = 1e-6  # of a sum over ranks in 32 bits
LOOKS = 16  # micro-batches: a look for such targets waits for the device


def forward(task: Task, model: Callable[..., Any], data: Any) -> Any:
    """The output of the model for one collated batch."""
    inputs = task.inputs(data)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def weighted_losses(
    task: Task, output: Any, data: Any, samples: int, *, may_weigh: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The losses of a batch times their weights, and the weights; `None` where all are 1.

    `may_weigh` is false if the task has no `weight` of its own.
    """
    losses = task.loss(output, data)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != samples:
        raise _not_per_sample(losses, samples, output)
    if not losses.requires_grad and _is_learning(output):
        raise _without_gradient(losses)
    if losses.dtype in (torch.float16, torch.bfloat16):
        losses = losses.float()  # they are summed over samples: 16 bits would not hold that
    weight = task.weight(data) if may_weigh else None
    if weight is None:
        return losses, None
    if not isinstance(weight, Tensor) or weight.shape != losses.shape:
        shape = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "no tensor"
        raise RequestError(
            asked="weight(batch) of the task",
            found=f"{shape}, with losses of shape {tuple(losses.shape)}",
            why="every value of the loss has one weight",
            do=f"return a tensor of shape {tuple(losses.shape)}",
        )
    return losses * weight, weight.to(losses.dtype)


class UnweightedLosses:
    """Checks from step to step that losses without weights may be averaged over all values.

    They may if every sample has the same number of values. Batches that are padded to their longest
    sample vary with each batch, and with the number of ranks: then only `weight` says how much of
    it is padding. The same holds for targets that `cross_entropy` ignores.
    """

    def __init__(self) -> None:
        self._values: float | None = None  # of one sample
        self._looks = LOOKS

    def see(self, losses: Tensor, data: Any) -> None:
        """Check the losses of a micro-batch without weights; raises `RequestError`."""
        if losses.ndim == 1:
            if self._values != 1.0:
                self._check(1.0)
            return
        self._check(losses.numel() / losses.shape[0])
        if self._looks:
            self._looks -= 1
            if any(_ignored(losses, tensor) for tensor in tensors_in(data)):
                raise _without_weight(
                    f"targets of {IGNORED} with a loss of 0, and no weight(batch)",
                    "the mean would be over these tokens, too, which torch leaves out of its own",
                )

    def sum_up(self, samples: int, weight: float) -> None:
        """Raise if samples of other ranks have more values, or fewer, than those of this one."""
        if self._values is None or not samples:
            return
        if not math.isclose(weight / samples, self._values, rel_tol=ROUNDED):
            self._check(weight / samples)

    def _check(self, values: float) -> None:
        if self._values is None:
            self._values = values
        if values != self._values:
            raise _without_weight(
                f"{self._values:g} values of the loss for a sample, then {values:g}, and no "
                "weight(batch)",
                "the mean would be over padding, too, and how much of it there is follows the "
                "number of ranks",
            )


class NotCompared(UnweightedLosses):
    """The same for passes outside of the steps, whose batches are cut differently: no check."""

    def see(self, losses: Tensor, data: Any) -> None:
        pass


def _ignored(losses: Tensor, tensor: Tensor) -> bool:
    """Whether these are targets, some of which `cross_entropy` has ignored."""
    if tensor.shape != losses.shape or tensor.dtype != torch.int64:
        return False
    ignored = tensor == IGNORED
    return bool(ignored.any()) and not bool(losses.detach()[ignored].any())


def _without_weight(found: str, why: str) -> RequestError:
    return RequestError(
        asked="loss(output, batch) of the task",
        found=found,
        why=why,
        do="let weight(batch) return 1 for every value that counts and 0 for the rest, as in "
        "`return batch[1] != -100` (all ones if all of them count)",
    )


def _is_learning(output: Any) -> bool:
    """Whether a gradient is wanted here, and the output of the model has one."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(output))


def _without_gradient(losses: Tensor) -> RequestError:
    found = "a tensor without a gradient" if losses.is_floating_point() else "whole numbers"
    return RequestError(
        asked="loss(output, batch) of the task",
        found=f"{found} ({losses.dtype}), where the output of the model has one",
        why="the weights are updated by the gradient of the loss",
        do="compute it of `output` itself, without .detach(), .item(), torch.no_grad() or argmax",
    )


LEAVE_THE_MEAN_OUT = (
    'leave the mean out, for example cross_entropy(output, target, reduction="none")'
)


def _not_per_sample(losses: Any, samples: int, output: Any) -> RequestError:
    found, do = f"a {type(losses).__name__}", LEAVE_THE_MEAN_OUT
    if isinstance(losses, Tensor):
        found = "a scalar" if losses.ndim == 0 else f"a tensor of shape {tuple(losses.shape)}"
        if losses.ndim == 1 and len(losses) and len(losses) % samples == 0:
            each = len(losses) // samples
            do = f"of {each} tokens each, in their order: loss.view({samples}, {each}), which is "
            do += "loss.view(len(batch), -1) for a batch of any size"
    if losses is getattr(output, "loss", None):
        do = "compute it of output.logits, and leave labels out of inputs(batch): "
        do += LEAVE_THE_MEAN_OUT.removeprefix("leave the mean out, for example ")
    return RequestError(
        asked="loss(output, batch) of the task",
        found=f"{found} for {samples} samples",
        why="the loss is one value per sample (or per token): the engine owns the mean, because "
        "only it knows the whole global batch",
        do=do,
    )


# --- batch loss ----------------------------------------------------------------------------------
# A loss that couples samples (`loss_over = "batch"`): contrastive, mixture-of-experts balance.
#
# The outputs and batches of all ranks are gathered, in shard order. Every rank computes the same
# loss of the whole global batch, and runs the gradient of its own rows backward through its own
# forward passes. Their graphs are kept until then, so micro-batches do not bound the memory here.
# `collate` says which data can be gathered.


MicroLoss = tuple[Tensor, float | Tensor, Callable[[], None]]
"""Of one micro-batch: the sum of its losses, of its weights, and a function that runs backward."""
MicroStep = Callable[[MicroBatch], MicroLoss]


class BatchLoss:
    """Runs the forward passes of a step, gathers, computes the loss; then backward in parts."""

    def __init__(self, task: Task, comm: Comm, precision: Precision) -> None:
        self.task, self.comm, self.precision = task, comm, precision
        self.uses: list[bool] = []  # of the tensors of the output, in the last step
        self.is_on = False  # while the task computes it
        self.dealt: Shares | None = None  # unless shares are even

    def prepare(
        self,
        batch: Batch,
        forward: Callable[[MicroBatch], Any],
        after_forward: Callable[[], Any],
        loss_scale: float = 1.0,
    ) -> MicroStep:
        """Run all forward passes, then `after_forward`, and the loss of the whole batch.

        On a rank without a sample, `after_forward` returns the output for `batch.spare`, which
        shows the shapes and types of the output.
        Returns a function to call once for each micro-batch, in order. It returns the sums of
        losses and weights of the rows, and a function that runs their gradient backward.
        """
        outputs = [forward(micro) for micro in batch.micros]
        spare = after_forward()
        detached = [map_tensors(Tensor.detach, output) for output in outputs or [spare]]
        whole, rows_before = self._whole(batch, detached)
        losses, weights, gradients = self._differentiated(whole, batch.nominal, loss_scale)
        self.uses = [gradient is not None for gradient in gradients]
        waiting = deque(outputs)
        row = rows_before

        def take(micro: MicroBatch) -> MicroLoss:
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

            local = losses[rows].detach()
            weight = local.numel() if weights is None else weights[rows].sum()
            return local.sum(), weight, backward

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
        rows = rows_of_ranks(batch.sizes, self.comm.size, self.dealt)
        before = sum(rows[: self.comm.rank])
        parts = [
            ({"output": output, "batch": micro.data}, micro.samples)
            for output, micro in zip(outputs, batch.to_read, strict=True)
        ]
        local = own_rows(parts)
        assert local is not None, "the data gives a rank without a sample a spare one"
        if isinstance(local, BatchRows):
            local = local if batch.micros else local.without_rows()
        elif self.comm.size == 1 and len(parts) == 1:
            return parts[0][0], before  # nothing to join
        whole = gathered(self.comm, local, rows)
        return whole.rebuilt(whole.tensors, whole.lists), before


def uses_a_parameter(name: str) -> RequestError:
    """The error if the loss over a batch uses a parameter directly."""
    return RequestError(
        asked='loss(output, batch) of a task with loss_over = "batch"',
        found=f"it uses the parameter {name!r} itself",
        why="every rank computes this loss, so that gradient would count once for each",
        do="let the model return it with its output, one row for each sample",
    )


LOOKED_AT = 2  # the first steps, whose graphs are looked through
ROUNDING = 64  # times the precision of a number: sums of equal numbers over ranks are not exact


class Regularizer:
    """What `task.regularizer` gives in each step, with its first values looked through.

    Within `whole_weights()` the weights of the model are whole.
    """

    def __init__(
        self, task: Task, whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.task, self._whole_weights = task, whole_weights
        self.is_there = task.overrides("regularizer")
        self.was: float | Tensor = 0.0
        self._looked_at = 0

    def of(self, model: nn.Module) -> Tensor | None:
        """Compute the regularizer; `None` if the task has none."""
        if self._looked_at >= LOOKED_AT:
            with self._whole_weights():
                return self.task.regularizer(model)
        self._looked_at += 1
        before = newest_node()
        with self._whole_weights():
            value = self.task.regularizer(model)
        if value is not None:
            check_is_of_weights(value, before)
        return value

    def check(self, mean: float, kind: torch.dtype, value: float) -> None:
        """Raise `RequestError` unless all ranks had the same last value; `mean` is over them."""
        if value == mean or not math.isfinite(value) or not math.isfinite(mean):
            return  # the guard reports values that are not finite
        if abs(value - mean) > ROUNDING * torch.finfo(kind).eps * abs(value):
            raise from_forward(f"{value:.9g} on this rank, {mean:.9g} in the mean over all ranks")


def newest_node() -> int:
    """The sequence number of a new node of autograd."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())


def check_is_of_weights(value: Tensor, before: int) -> None:
    """Raise `RequestError` if `value` depends on a node that is older than number `before`."""
    ahead: list[Any] = [value.grad_fn]
    visited: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if getattr(node, "_sequence_nr", lambda: before)() < before:
            raise from_forward(f"{node.name()}, which a forward pass has computed")
        ahead += [parent for parent, _ in node.next_functions]


def from_forward(found: str) -> RequestError:
    """The error for a regularizer that depends on the samples of a rank."""
    return RequestError(
        asked="regularizer(model) of the task",
        found=found,
        why="it is added once for all ranks, so it may depend on the weights alone",
        do="return such a term with the output, a row for each sample, and add it in loss(); with "
        'loss_over = "batch" where it couples the samples, as a balance over the batch does',
    )
