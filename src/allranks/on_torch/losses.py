"""From a batch to the weighted losses of its samples, with what a task returns checked.

Called in every forward pass: by the shared step, by the loss over a batch, and by evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.on_torch.task import Task


def forward(task: Task, model: Callable[..., Any], data: Any) -> Any:
    """The output of the model for one collated batch."""
    inputs = task.inputs(data)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def weighted_losses(
    task: Task, output: Any, data: Any, samples: int
) -> tuple[Tensor, Tensor | None]:
    """The losses of a batch times their weights, and the weights; `None` where all are 1."""
    losses = task.loss(output, data)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != samples:
        raise _not_per_sample(losses, samples)
    if losses.dtype in (torch.float16, torch.bfloat16):
        losses = losses.float()  # they are summed over samples: 16 bits would not hold that
    weight = task.weight(data)
    if weight is None:
        return losses, None
    if not isinstance(weight, Tensor) or weight.shape != losses.shape:
        what = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "no tensor"
        raise RequestError(
            asked="weight(batch) of the task",
            found=f"{what}, with losses of shape {tuple(losses.shape)}",
            why="every value of the loss has one weight",
            do=f"return a tensor of shape {tuple(losses.shape)}",
        )
    return losses * weight, weight.to(losses.dtype)


def _not_per_sample(losses: Any, samples: int) -> RequestError:
    found = f"a {type(losses).__name__}"
    if isinstance(losses, Tensor):
        found = "a scalar" if losses.ndim == 0 else f"a tensor of shape {tuple(losses.shape)}"
    return RequestError(
        asked="loss(output, batch) of the task",
        found=f"{found} for {samples} samples",
        why="the loss is one value per sample (or per token): the engine owns the mean, because "
        "only it knows the whole global batch",
        do='leave the mean out, for example cross_entropy(output, target, reduction="none")',
    )
