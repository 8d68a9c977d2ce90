"""A plain loop over learners in one process: what `local-sgd`, `diloco` and the others must equal.

It knows nothing of ranks, flat tensors or messages: models, optimizers, dicts of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import contract_tasks
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.training.order import Order

Weights = dict[str, Tensor]
Outer = Callable[[Weights, Weights], tuple[Weights, Weights]]
"""From the global weights and what was found (old minus new) to the new ones and a start."""
Coded = Callable[[Tensor], Tensor]
"""What a message says of flat numbers."""


def average(weights: Weights, found: Weights) -> tuple[Weights, Weights]:
    new = {n: w - found[n] for n, w in weights.items()}
    return new, new


def nesterov(lr: float, momentum: float) -> Outer:
    """torch's own SGD, given what was found for a gradient."""
    held: dict[str, nn.Parameter] = {}
    made: list[torch.optim.SGD] = []

    def outer(weights: Weights, found: Weights) -> tuple[Weights, Weights]:
        if not made:
            held.update({n: nn.Parameter(w.clone()) for n, w in weights.items()})
            made.append(torch.optim.SGD(held.values(), lr, momentum, nesterov=momentum > 0))
        for name, parameter in held.items():
            parameter.grad = found[name]
        made[0].step()
        new = {n: p.detach().clone() for n, p in held.items()}
        return new, new

    return outer


def slowmo(alpha: float, beta: float, rate: float) -> Outer:
    kept: Weights = {}

    def outer(weights: Weights, found: Weights) -> tuple[Weights, Weights]:
        for name, one in found.items():
            kept[name] = beta * kept.get(name, torch.zeros_like(one)) + one / rate
        new = {n: w - alpha * rate * kept[n] for n, w in weights.items()}
        return new, new

    return outer


def block_momentum(momentum: float) -> Outer:
    """The paper's: the next block begins ahead of the global weights."""
    moved: Weights = {}

    def outer(weights: Weights, found: Weights) -> tuple[Weights, Weights]:
        for name, one in found.items():
            moved[name] = momentum * moved.get(name, torch.zeros_like(one)) - one
        new = {n: w + moved[n] for n, w in weights.items()}
        return new, {n: w + momentum * moved[n] for n, w in new.items()}

    return outer


def four_bits(flat: Tensor) -> Tensor:
    """Each number as 0 or a power of two of the largest of its 512, whichever is nearest."""
    found = []
    for part in flat.split(512) if len(flat) else ():
        scale = part.abs().max().float().item()
        sizes = [0.0, *(scale * 2.0**-at for at in range(6, -1, -1))]
        for number in part.tolist():
            nearest = min(reversed(sizes), key=lambda size: abs(size - abs(number)))
            found.append(-nearest if number < 0 else nearest)
    return flat.new_tensor(found)


def largest(keep: int, chunk: int) -> Coded:
    """The `keep` largest of each chunk; of equal ones the first."""

    def coded(flat: Tensor) -> Tensor:
        found = torch.zeros_like(flat)
        for start in range(0, len(flat), chunk):
            part = flat[start : start + chunk].tolist()
            order = sorted(range(len(part)), key=lambda at: (-abs(part[at]), at))
            for at in order[:keep]:
                found[start + at] = part[at]
        return found

    return coded


def simulate(
    task: contract_tasks.Plain,
    learners: int,
    steps: int,
    *,
    every: int,
    outer: Outer = average,
    after: int = 0,
    near: int = 0,
    group: int = 1,
    reset: bool = False,
    coded: Coded | None = None,
    decay: float = 1.0,
) -> Weights:
    """The global weights after so many steps of all, and a last meeting."""
    torch.manual_seed(0)
    models = [task.model().double() for _ in range(learners)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [task.optimizer(model) for model in models]
    weights = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    start, trained = dict(weights), [0] * learners
    left = [torch.zeros(sum(w.numel() for w in weights.values())).double() for _ in models]

    def found_by(number: int) -> Weights:
        own = dict(models[number].named_parameters())
        found = {name: start[name] - own[name].detach() for name in weights}
        if coded is None or not trained[number]:
            return found
        left[number] = decay * left[number] + torch.cat([f.flatten() for f in found.values()])
        sent = coded(left[number])
        left[number] = left[number] - sent
        parts = sent.split([f.numel() for f in found.values()])
        return {n: p.view(f.shape) for (n, f), p in zip(found.items(), parts, strict=True)}

    def meet() -> None:
        nonlocal weights, start
        each = [found_by(number) for number in range(learners)]
        found = {
            name: sum(n * one[name] for one, n in zip(each, trained, strict=True)) / sum(trained)
            for name in weights
        }
        weights, start = outer(weights, found)
        for number, model in enumerate(models):
            _put(model, start)
            trained[number] = 0
            if reset:
                optimizers[number].state.clear()

    for step in range(steps):
        parts = _parts(task, step, learners)
        if step < after:
            whole = [torch.cat([part[k] for part in parts]) for k in range(len(parts[0]))]
            parts = [whole] * learners
        for number, (model, optimizer, part) in enumerate(
            zip(models, optimizers, parts, strict=True)
        ):
            if len(part[0]):
                optimizer.zero_grad()
                task.loss(model(part[0]), part).mean().backward()
                optimizer.step()
                trained[number] += len(part[0])
        if step < after:
            weights = {n: p.detach().clone() for n, p in models[0].named_parameters()}
            start, trained = dict(weights), [0] * learners
        elif (step + 1 - after) % every == 0:
            meet()
        elif near and (step + 1 - after) % near == 0:
            for first in range(0, learners, group):
                _average(models[first : first + group])
    if (steps - after) % every:
        meet()
    return weights


def _parts(task: contract_tasks.Plain, step: int, learners: int) -> list[list[Any]]:
    data = task.train_data()
    order = Order(len(data[0]), task.batch_size, 0, "keep")
    chosen = order.batch(*divmod(step, order.steps_per_epoch))
    sizes = even_sizes(len(chosen), task.shards)
    found = []
    for learner in range(learners):
        owned = owned_shards(task.shards, learners, learner)
        first = sum(sizes[: owned.start])
        own = chosen[first : first + sum(sizes[k] for k in owned)]
        found.append([tensor[own] for tensor in data])
    return found


def _put(model: nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _average(models: list[nn.Module]) -> None:
    rows = [dict(model.named_parameters()) for model in models]
    mean = {n: torch.stack([row[n].detach() for row in rows]).mean(0) for n in rows[0]}
    for model in models:
        _put(model, mean)
