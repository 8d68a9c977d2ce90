"""Twenty faults of hand-written parallel code, each beside its correct twin: no task, no engine.

A case is a step function with `wrong`, and what `same_on_ranks` must say of it: step, tensor, cause
("" where it names none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from allranks.testing import samples, shard

Named = dict[str, Any]
STEPS = 2


class Case(NamedTuple):
    step: int
    tensor: str
    kind: str
    function: Callable[..., Any]


CASES: dict[str, Case] = {}


def case(step: int, tensor: str, kind: str) -> Callable[..., Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = Case(step, tensor, kind, function)
        return function

    return add


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part(rows: Tensor, rank: int, world: int) -> Tensor:
    """A rank's rows, of which the first ranks may have one more than the others."""
    return rows.tensor_split(world)[rank]


def total(value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value, op)
    return value


def trained(
    rank: int, world: int, wrong: str = "", rate: float = 0.1, rows: int = 12
) -> Iterator[Named]:
    """Data-parallel training by hand, with one of several mistakes."""
    x, y, model = drawn(rows, 4), drawn(rows, 3, seed=2), nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(drawn(3, 4, seed=3))
        model.bias.zero_()
    before: dict[str, Tensor] = {}
    for step in range(STEPS):
        model.zero_grad()
        mine = (model(part(x, rank, world)) - part(y, rank, world)).square()
        if wrong == "mean of means":
            mine.mean().backward()
        else:
            (mine.sum() / y.numel() * world).backward()
        if wrong == "clip first":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grads = {name: p.grad for name, p in model.named_parameters()}
        for name, grad in grads.items():
            own, size = grad.clone(), world
            if wrong == "not the bias" and name == "bias":
                continue
            if wrong == "in 16 bits":
                grad.copy_(total(grad.to(torch.bfloat16)).to(grad.dtype))
            else:
                dist.all_reduce(grad)
            grad /= 1 if wrong == "no division" else size**2 if wrong == "two divisions" else size
            if wrong == "own part twice" and world > 1:
                grad += own / size
            if wrong == "late" and world > 1 and step:
                grad.copy_(before[name])
        before = {name: grad.clone() for name, grad in grads.items()}
        if wrong != "clip first":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * (world if wrong == "rate" and step else 1) * p.grad
        yield {"grad": before, "weight": {n: p for n, p in model.named_parameters()}}


def of_training(name: str, step: int, tensor: str, kind: str, mistake: str, rows: int = 12) -> None:
    CASES[name] = Case(
        *(step, tensor, kind),
        lambda rank, world, *, wrong: trained(rank, world, mistake if wrong else "", rows=rows),
    )


of_training("no_division", 0, "grad.weight", "scale", "no division")
of_training("two_divisions", 0, "grad.weight", "scale", "two divisions")
of_training("bias_not_reduced", 0, "grad.bias", "not-reduced", "not the bias")
of_training("mean_of_means", 0, "grad.weight", "weighted", "mean of means", rows=11)
of_training("half_precision", 0, "grad.weight", "rounding", "in 16 bits")
of_training("own_part_twice", 0, "grad.weight", "counted-twice", "own part twice")
of_training("late_gradient", 1, "grad.weight", "stale", "late")
of_training("rate_times_ranks", 1, "weight.weight", "scale", "rate")
of_training("clip_before_the_mean", 0, "grad.weight", "", "clip first")


@case(0, "loss", "weighted")
def tokens(rank: int, world: int, *, wrong: bool) -> Named:
    """A loss over the tokens that are not ignored, of which ranks have unequal numbers."""
    target = torch.tensor([[0, 1, 2, 1]] * 6 + [[1, -100, -100, -100]] * 6)
    logits, mine = (part(t, rank, world) for t in (drawn(12, 4, 3), target))
    if wrong:
        return {"loss": total(F.cross_entropy(logits.transpose(1, 2), mine)) / world}
    summed = F.cross_entropy(logits.transpose(1, 2), mine, reduction="sum")
    return {"loss": total(summed) / total((mine >= 0).sum())}


@case(0, "output", "counted-twice")
def bias_on_each_rank(rank: int, world: int, *, wrong: bool) -> Named:
    """A linear layer cut along its inputs."""
    x, weight, bias = drawn(5, 12), drawn(3, 12, seed=2), drawn(3, seed=3)
    x, weight = (t.tensor_split(world, dim=1)[rank] for t in (x, weight))
    mine = F.linear(x, weight, bias if wrong or rank == 0 else None)
    return {"bias": bias, "output": total(mine)}


@case(0, "grad_input", "not-reduced")
def input_gradient(rank: int, world: int, *, wrong: bool) -> Named:
    """A linear layer cut along its outputs: its input gets a gradient from every part."""
    x, weight = drawn(5, 4).requires_grad_(), drawn(12, 4, seed=2)
    output = F.linear(x, part(weight, rank, world))
    output.square().sum().backward()
    grad = x.grad if wrong else total(x.grad)
    return {"output": shard(output, dim=1), "grad_input": grad}


@case(0, "output", "order")
def gathered_in_another_order(rank: int, world: int, *, wrong: bool) -> Named:
    mine = drawn(12, 4).chunk(world)[rank].exp()
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return {"output": torch.cat(parts[::-1] if wrong else parts)}


@case(0, "weight", "seeds")
def seeded_by_rank(rank: int, world: int, *, wrong: bool) -> Named:
    torch.manual_seed(rank if wrong else 7)
    return {"weight": nn.Linear(4, 3).weight}


@case(0, "noise", "seeds")
def not_seeded(rank: int, world: int, *, wrong: bool) -> Named:
    random = np.random if wrong else np.random.RandomState(3)
    return {"noise": random.uniform(size=5)}


@case(0, "output", "dropout")
def one_mask_for_all(rank: int, world: int, *, wrong: bool) -> Named:
    torch.manual_seed(5)
    x = drawn(12, 4)
    if wrong:
        return {"output": shard(F.dropout(part(x, rank, world)))}
    return {"output": shard(part(F.dropout(x), rank, world))}


@case(0, "norm", "as-sum")
def maximum_for_sum(rank: int, world: int, *, wrong: bool) -> Named:
    mine = part(drawn(12), rank, world).square().sum()
    return {"norm": total(mine, dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM).sqrt()}


@case(0, "output", "batchnorm")
def local_batchnorm(rank: int, world: int, *, wrong: bool) -> Named:
    x = drawn(12, 4)
    if wrong:
        return {"output": shard(F.batch_norm(part(x, rank, world), None, None, training=True))}
    return {"output": shard(part(F.batch_norm(x, None, None, training=True), rank, world))}


@case(0, "rows", "samples")
def padded(rank: int, world: int, *, wrong: bool) -> Named:
    """A sampler that gives each rank as many samples, with some twice."""
    order = torch.randperm(13, generator=torch.Generator().manual_seed(2))
    if wrong:
        order = torch.cat([order, order])[: -(-13 // world) * world]
    return {"rows": samples(order[rank::world])}


@case(0, "grad.0.weight", "scale")
def sharded_by_fsdp2(rank: int, world: int, *, wrong: bool) -> Named:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(drawn(*p.shape, seed=number))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    loss = model(part(drawn(12, 4), rank, world)).square().mean()
    (loss * world if wrong else loss).backward()
    return {"grad": {name: p.grad for name, p in model.named_parameters()}}
