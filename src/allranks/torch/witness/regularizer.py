"""Is a regularizer a function of the weights? One that reads what a forward pass left is not.

`regularizer(model)` is added once, after the gradients of all ranks are summed. What a forward pass
has left on the model (the balance loss of a router) is that of one rank's last micro-batch, so it
would not be the task's loss on any number of ranks, and ranks would drift apart.

Every node that autograd makes has a number, counted up in its thread: a node that is older than the
call belongs to a forward pass. What has no node (a detached value) differs between ranks, which
the tally of the next step shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.task import Task

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
