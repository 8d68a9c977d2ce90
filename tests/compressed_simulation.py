"""A plain loop in one process of ranks whose gradients are compressed before they are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import contract_tasks
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.training.order import Order

STEPS = 20
Sum = Callable[[list[list[Tensor]], dict[Any, Tensor]], list[Tensor]]
"""Of the gradients of each rank, and what is kept from step to step, the sums."""


def simulated(ranks: int, summed: Sum, after: int = 0) -> dict[str, Tensor]:
    """A plain loop in one process over the gradients of each rank's samples."""
    task = contract_tasks.Plain()
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model)
    data = task.train_data()
    order = Order(len(data[0]), task.batch_size, 0, "keep")
    kept: dict[Any, Tensor] = {}
    for step in range(STEPS):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        sizes = even_sizes(len(chosen), task.shards)
        of_ranks = []
        for rank in range(ranks):
            owned = owned_shards(task.shards, ranks, rank)
            first = sum(sizes[: owned.start])
            own = chosen[first : first + sum(sizes[k] for k in owned)]
            batch = [tensor[own] for tensor in data]
            loss = task.loss(model(batch[0]), batch).sum() / len(chosen)
            of_ranks.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        plain = [torch.stack(own).sum(0) for own in zip(*of_ranks, strict=True)]
        total = plain if step < after else summed(of_ranks, kept)
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
