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
THRESHOLD = 0.02
Sum = Callable[[list[list[Tensor]], dict[Any, Tensor]], list[Tensor]]
"""Of the gradients of each rank, and what is kept from step to step, the sums."""


def simulated(
    ranks: int, summed: Sum, after: int = 0, kind: type[contract_tasks.Plain] = contract_tasks.Plain
) -> dict[str, Tensor]:
    """A plain loop in one process over the gradients of each rank's samples."""
    task = kind()
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


def top_k_sum(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
    """Three of each 16 numbers; a gradient begins at a multiple of 16 in its bucket."""
    found = [torch.zeros_like(gradient) for gradient in of_ranks[0]]
    for rank, gradients in enumerate(of_ranks):
        for at, gradient in enumerate(gradients):
            left = kept.get((rank, at), torch.zeros_like(gradient)).flatten() + gradient.flatten()
            for start in range(0, left.numel(), 16):
                part = left[start : start + 16]
                order = sorted(range(len(part)), key=lambda k: (-abs(float(part[k])), k))
                for k in order[:3]:
                    found[at].view(-1)[start + k] += part[k]
                    part[k] = 0
            kept[rank, at] = left.view(gradient.shape)
    return found


def two_bit_sum(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
    found = [torch.zeros_like(gradient) for gradient in of_ranks[0]]
    for rank, gradients in enumerate(of_ranks):
        for at, gradient in enumerate(gradients):
            left = kept.get((rank, at), torch.zeros_like(gradient)) + gradient
            sent = THRESHOLD * ((left >= THRESHOLD).double() - (left <= -THRESHOLD).double())
            kept[rank, at] = left - sent
            found[at] += sent
    return found
