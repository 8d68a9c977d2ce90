"""Which experts a token goes to, and what of it is balanced: pure functions of tensors.

Tokens lie in groups, runs of rows that no number of ranks changes. Within a group an expert takes
its `capacity` of tokens and drops the rest: first choices before second ones, and of these the
first tokens. Of equal probabilities the expert with the lower number is chosen. Lepikhin et al.
2020, GShard, arXiv 2006.16668; Fedus et al. 2021, Switch Transformers, arXiv 2101.03961.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chosen:
    """Of each token, (tokens, experts): its probabilities; (tokens, k): experts, gates, best first.

    `counted` says which tokens are no padding; `None`: all.
    """

    probabilities: Tensor
    experts: Tensor
    gates: Tensor
    counted: Tensor | None


@dataclass(frozen=True)
class Routed:
    """The rows that go to experts, sorted by expert, then by group, choice and token.

    `tokens` are those of each row, `counts` how many rows each expert takes; `places` says where a
    token's choice is among the rows, (tokens, k), and one behind the last row for what is dropped.
    """

    tokens: Tensor
    counts: list[int]
    places: Tensor


def choose(logits: Tensor, top_k: int, counted: Tensor | None) -> Chosen:
    """The softmax over all experts, and the `top_k` of each token.

    The gate of one is its probability; those of several are divided by their sum.
    """
    probabilities = logits.softmax(-1)
    ranked, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    gates = ranked[:, :top_k]
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return Chosen(probabilities, experts[:, :top_k], gates, counted)


def route(chosen: Chosen, groups: list[int], capacity_factor: float | None) -> Routed:
    """Give rows to experts; `groups` are the tokens of each group, in order."""
    tokens, top_k = chosen.experts.shape
    experts, device = chosen.probabilities.shape[1], chosen.experts.device
    group = torch.arange(len(groups), device=device)
    group = group.repeat_interleave(torch.tensor(groups, device=device), output_size=tokens)
    choice = torch.arange(top_k, device=device).expand(tokens, top_k)
    key = (chosen.experts * len(groups) + group[:, None]) * top_k + choice
    if chosen.counted is not None:
        key = key.masked_fill(~chosen.counted[:, None], experts * len(groups) * top_k)
    order = key.flatten().argsort(stable=True)
    slot = key.flatten()[order] // top_k  # (expert, group) of each row
    sizes = torch.bincount(slot, minlength=experts * len(groups) + 1)
    kept = slot < experts * len(groups)
    if capacity_factor is not None:
        first = sizes.cumsum(0) - sizes
        position = torch.arange(len(order), device=device) - first[slot]
        limits = capacities(group_sizes(chosen, groups), top_k, experts, capacity_factor)
        kept &= position < limits[slot % len(groups)]
    rows = order[kept]
    places = rows.new_full((tokens * top_k,), len(rows))
    places[rows] = torch.arange(len(rows), device=device)
    counts = torch.bincount(slot[kept] // len(groups), minlength=experts)
    return Routed(rows // top_k, counts.tolist(), places.view(tokens, top_k))


def capacities(sizes: Tensor, top_k: int, experts: int, factor: float) -> Tensor:
    """How many rows an expert takes of groups of so many tokens: `factor` times its even share.

    In whole rows, at least one.
    """
    share = sizes.double() * (factor * top_k / experts)
    return (share - 1e-9).ceil().clamp(min=1).long()


def group_sizes(chosen: Chosen, groups: list[int]) -> Tensor:
    """The tokens of each group that count."""
    if chosen.counted is None:
        return torch.tensor(groups, device=chosen.experts.device)
    return torch.stack([part.sum() for part in chosen.counted.split(groups)])


def balance_losses(chosen: Chosen, groups: list[int]) -> Tensor:
    """Of each group the loss that is 1 where experts share it evenly, and more where they do not.

    experts · sum over the experts of (its share of what was chosen · its mean probability). Choices
    count that are dropped, and none of padding; a group without a token has 0.
    """
    experts = chosen.probabilities.shape[1]
    chose = torch.zeros_like(chosen.probabilities)
    chose = chose.scatter(1, chosen.experts, 1 / chosen.experts.shape[1])
    probabilities = chosen.probabilities
    if chosen.counted is not None:
        chose = chose * chosen.counted[:, None]
        probabilities = probabilities * chosen.counted[:, None]
    share = torch.stack([part.sum(0) for part in chose.split(groups)])
    mean = torch.stack([part.sum(0) for part in probabilities.split(groups)])
    size = group_sizes(chosen, groups).clamp(min=1).to(mean.dtype)[:, None]
    return experts * (share / size * (mean / size)).sum(1)


def z_losses(logits: Tensor, counted: Tensor | None, rows: int) -> Tensor:
    """Of each row of the input the mean over its tokens of log(sum of exp(logits)), squared.

    Zoph et al. 2022, ST-MoE, arXiv 2202.08906.
    """
    squares = logits.logsumexp(-1).square().view(rows, -1)
    if counted is None:
        return squares.mean(1)
    of_row = counted.view(rows, -1)
    return (squares * of_row).sum(1) / of_row.sum(1).clamp(min=1)


def bound(width: int) -> float:
    """The range of initial weights of layers with so many inputs, as those of `nn.Linear`."""
    return 1 / math.sqrt(width)
