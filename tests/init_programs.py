"""Programs drawn at random: what may be done with tensors while a model is built, mixed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Pool = list[Tensor]
ROWS, COLUMNS = 5, 4


def any_of(pool: Pool, dice: random.Random) -> Tensor:
    return dice.choice(pool)


def view_of(tensor: Tensor, dice: random.Random) -> Tensor:
    start = dice.randrange(3)
    ways: list[Callable[[], Tensor]] = [
        lambda: tensor,
        lambda: tensor[start:],
        lambda: tensor[:, start : start + 1],
        lambda: tensor.t(),
        lambda: tensor.detach().as_strided((2, 3), (1, 2), start),
        lambda: tensor.data.view(-1)[::2] if tensor.is_contiguous() else tensor.data,
        lambda: tensor.split(2)[0],
        lambda: tensor[1],
    ]
    return dice.choice(ways)()


def new(pool: Pool, dice: random.Random) -> None:
    made: list[Callable[[], Tensor]] = [
        lambda: torch.rand(ROWS, COLUMNS),
        lambda: torch.randn(COLUMNS, ROWS).t(),
        lambda: torch.arange(20.0).view(ROWS, COLUMNS),
        lambda: torch.full((ROWS, COLUMNS), 0.5),
        lambda: torch.tensor([[dice.random()] * COLUMNS] * ROWS),
        lambda: torch.from_numpy(np.random.rand(ROWS, COLUMNS).astype(np.float32)),
        lambda: torch.empty(ROWS, COLUMNS).exponential_(),
        lambda: nn.init.trunc_normal_(nn.Linear(COLUMNS, ROWS).weight, std=0.9, a=-1, b=1).detach(),
        lambda: nn.init.orthogonal_(torch.empty(ROWS, COLUMNS)),
        lambda: torch.randperm(20).float().view(ROWS, COLUMNS),
    ]
    pool[dice.randrange(len(pool))] = dice.choice(made)()


def computed(pool: Pool, dice: random.Random) -> None:
    one, other = any_of(pool, dice), any_of(pool, dice)
    made: list[Callable[[], Tensor]] = [
        lambda: one * 0.7 + other,
        lambda: torch.where(one > 0.4, one, other),
        lambda: torch.cat((one[:2], other[2:])),
        lambda: one.clone(),
        lambda: copy.deepcopy(one.detach().clone()),
        lambda: one.sort(dim=0).values,
        lambda: one @ other.t() @ other / 9,
        lambda: nn.functional.dropout(one, 0.3),
        lambda: torch.rand_like(one) * other,
        lambda: torch.bernoulli(one.sigmoid()) + other,
        lambda: one.flip(0).cumsum(1) / 4,
        lambda: nn.functional.layer_norm(one, (COLUMNS,)),
        lambda: one.double().float(),
        lambda: one.to("cpu"),
        lambda: other.t().contiguous().t(),
    ]
    pool[dice.randrange(len(pool))] = dice.choice(made)()


def changed(pool: Pool, dice: random.Random) -> None:
    tensor, other = any_of(pool, dice), any_of(pool, dice)
    target = view_of(tensor, dice)
    kept = tensor.clone()
    ways: list[Callable[[], object]] = [
        lambda: target.mul_(0.5),
        lambda: target.normal_(),
        lambda: target.uniform_(-1, 1),
        lambda: target.zero_(),
        lambda: target.add_(1),
        lambda: target.clamp_(-0.9, 0.9),
        lambda: tensor.copy_(other.clone()),
        lambda: tensor.lerp_(other, 0.3),
        lambda: tensor.copy_(kept.flip(0)),
        lambda: tensor.masked_fill_(other > 0.5, 0.25),
        lambda: tensor.__setitem__([0, 2], other[1:3].clone()),
        lambda: tensor.__setitem__(kept < 0, 0.125),
        lambda: torch.mul(kept, other, out=tensor),
        lambda: nn.init.sparse_(tensor, 0.5),
        lambda: nn.functional.batch_norm(kept, tensor[0], tensor[1].abs_(), training=True),
    ]
    dice.choice(ways)()


def asked(pool: Pool, dice: random.Random) -> None:
    """A number decides what is done next."""
    tensor = any_of(pool, dice)
    if tensor.mean().item() > 0.2 or bool((tensor[0] > 1).any()):
        tensor.sub_(torch.rand(()))
    elif float(np.asarray(tensor)[0, 0]) > 0 or tensor.tolist()[1][1] > 0.1:
        pool.append(pool.pop(0))


def seeded(pool: Pool, dice: random.Random) -> None:
    own = torch.Generator().manual_seed(dice.randrange(99))
    if dice.random() < 0.5:
        torch.manual_seed(dice.randrange(99))
    any_of(pool, dice).normal_(generator=own)
    pool[0] = torch.rand(ROWS, COLUMNS, generator=own)


def rebound(pool: Pool, dice: random.Random) -> None:
    one = nn.Parameter(torch.empty(ROWS, COLUMNS))
    one.data = any_of(pool, dice).detach()
    pool[dice.randrange(len(pool))] = one.data


def drawn_program(seed: int, steps: int) -> nn.Module:
    """A model of six tensors, after so many things were done with them."""
    dice, pool = random.Random(seed), [torch.randn(ROWS, COLUMNS) for _ in range(6)]
    ways = [new, computed, computed, changed, changed, asked, seeded, rebound]
    with torch.no_grad():
        for _ in range(steps):
            dice.choice(ways)(pool, dice)
    model = nn.Module()
    for index, tensor in enumerate(pool):
        model.register_buffer(f"b{index}", tensor)
    model.kept = [view_of(tensor, dice) for tensor in pool]  # type: ignore[assignment]
    return model
