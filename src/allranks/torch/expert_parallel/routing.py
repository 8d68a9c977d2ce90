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

from allranks.torch.accelerator import holds, tensor_of


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

    `tokens` are those of each row; `places` says where a token's choice is among the rows,
    (tokens, k), and one behind the last row for what is dropped.
    """

    tokens: Tensor
    places: Tensor


@dataclass(frozen=True)
class Routes:
    """How many rows each expert takes, (experts,), where the device has it.

    `order` are all choices, (tokens · k), sorted as rows are; the `kept` ones become rows.
    """

    counts: Tensor
    order: Tensor
    kept: Tensor
    top_k: int

    def rows(self, count: int) -> Routed:
        """The rows, of which the host knows by now how many there are: it waits for nothing."""
        if holds(self.order):
            rows = self.order[torch.nonzero_static(self.kept, size=count).squeeze(1)]
        else:
            rows = self.order[self.kept]
        places = rows.new_full(self.order.shape, count)
        places[rows] = torch.arange(count, device=rows.device)
        return Routed(rows // self.top_k, places.view(-1, self.top_k))


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


def route(chosen: Chosen, groups: list[int], capacity_factor: float | None) -> Routes:
    """Give rows to experts; `groups` are the tokens of each group, in order."""
    tokens, top_k = chosen.experts.shape
    experts, device = chosen.probabilities.shape[1], chosen.experts.device
    group = torch.arange(len(groups), device=device)
    group = group.repeat_interleave(tensor_of(groups, device), output_size=tokens)
    choice = torch.arange(top_k, device=device).expand(tokens, top_k)
    key = (chosen.experts * len(groups) + group[:, None]) * top_k + choice
    if chosen.counted is not None:
        key = key.masked_fill(~chosen.counted[:, None], experts * len(groups) * top_k)
    order = key.flatten().argsort(stable=True)
    slot = key.flatten()[order] // top_k  # (expert, group) of each row
    slots = experts * len(groups)
    starts = torch.searchsorted(slot, torch.arange(slots + 1, device=device))
    kept, sizes = slot < slots, starts.diff().view(experts, len(groups))
    if capacity_factor is not None:
        position = torch.arange(len(order), device=device) - starts[slot]
        limits = capacities(group_sizes(chosen, groups), top_k, experts, capacity_factor)
        kept &= position < limits[slot % len(groups)]
        sizes = sizes.minimum(limits)
    return Routes(sizes.sum(1), order, kept, top_k)


def capacities(sizes: Tensor, top_k: int, experts: int, factor: float) -> Tensor:
    """How many rows an expert takes of groups of so many tokens: `factor` times its even share.

    In whole rows, at least one.
    """
    share = sizes.double() * (factor * top_k / experts)
    return (share - 1e-9).ceil().clamp(min=1).long()


def group_sizes(chosen: Chosen, groups: list[int]) -> Tensor:
    """The tokens of each group that count."""
    if chosen.counted is None:
        return tensor_of(groups, chosen.experts.device)
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
