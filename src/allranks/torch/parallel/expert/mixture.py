"""A mixture of experts: a layer of many MLPs, of which each token uses a few.

In one process, and under every strategy but `expert`, a rank computes all experts: this defines the
result. `expert` gives the layer an `exchange`, and only this rank's experts. The result does not
depend on the ranks: dropping and balancing count over shards of the global batch, or over samples,
so the loss, the gradient and its norm are those of one process. Shazeer et al. 2017,
arXiv 1701.06538.

An exchange sends rows to the ranks of their experts and back: two all-to-alls, and two in backward.

    forward      rows -> their experts' ranks, outputs -> back
    backward     gradients of outputs -> their experts' ranks, gradients of rows -> back

The number of rows depends on the data, so ranks exchange counts before (`control`). A rank without
rows makes the same calls with empty tensors. Experts see the rows of all ranks, so their gradient
is the sum over these already, and nothing is divided.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.accelerator import holds, tensor_of
from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import OfShard, full_type
from allranks.torch.parallel.tensor.exchange import TensorExchange, by_pair

END = -1  # in place of a layer: the forward pass is over
Compute = Callable[[Tensor, Sequence[int]], Tensor]


class ExpertExchange(TensorExchange):
    """The ranks of `comm`, each with the same number of experts, in order.

    `exchanged` are the bytes of rows that steps have sent to other ranks, by the rows that were
    routed there. `is_idle` tells whether a pass is made only for other ranks: then this rank sends
    no rows. `room` is the largest number of experts of a layer.
    """

    def __init__(self, comm: Comm, is_idle: Callable[[], bool]) -> None:
        super().__init__(comm)
        self.is_idle, self.exchanged, self.room = is_idle, 0, 0

    def computed(self, rows: Tensor, counts: list[list[int]], compute: Compute) -> Tensor:
        """The outputs of the experts of all ranks for rows that are sorted by expert.

        All ranks call this; `counts` are the rows of each rank for each expert.
        """
        local, experts = counts[self.comm.rank], len(counts[0]) // self.comm.size
        start = self.comm.rank * experts
        sizes = [row[start : start + experts] for row in counts]  # (source, own expert)
        gives = [sum(local[at : at + experts]) for at in range(0, len(local), experts)]
        takes = [sum(row) for row in sizes]
        received = exchanged(self, rows, gives, takes)
        of_experts = _transposed(sizes)
        outputs = compute(_by_expert(received, sizes), [sum(column) for column in of_experts])
        return exchanged(self, _by_expert(outputs, of_experts), takes, gives)

    def close_pass(self) -> None:
        """End a forward pass: detects ranks that have skipped a layer which others call.

        All ranks call this after the same number of forward passes; layers that backward recomputes
        come in between, on all ranks. Raises `RequestError` if others call a layer.
        """
        self.sizes(torch.zeros(0, dtype=torch.int64, device=self.comm.device), END)

    def sizes(self, counts: Tensor, layer: int) -> list[list[int]]:
        """How many rows each rank has for each expert. Sends all counts.

        All ranks call this for the same `layer`; raises `RequestError` if they call different ones.
        Messages of all layers have the same size, so that this is detected. If counts are on a
        device, the host waits for it once, here.
        """
        device, experts = self.comm.device, len(counts)
        part = tensor_of([layer, experts, *[0] * self.room], device)
        part[2 : 2 + experts] = counts
        whole = part.new_empty(self.comm.size * part.numel())
        self.comm.all_gather(whole, part, "control").wait()
        with self.comm.reading():
            rows = whole.view(self.comm.size, -1).tolist()
        if any(row[:2] != [layer, experts] for row in rows):
            raise _another_layer()
        return [row[2 : 2 + experts] for row in rows]

    def exchange_rows(self, rows: Tensor, gives: list[int], takes: list[int]) -> Tensor:
        """Send rows, split by `gives`, to the ranks; returns their rows, `takes` of each."""
        received = rows.new_empty(sum(takes), *rows.shape[1:])
        if self.kind == "gradients":
            away = sum(gives) - gives[self.comm.rank]
            self.exchanged += away * rows.shape[1] * rows.element_size()
        self.comm.all_to_all(received, rows.contiguous(), takes, gives, self.kind).wait()
        return received


def exchanged(exchange: ExpertExchange, rows: Tensor, gives: list[int], takes: list[int]) -> Tensor:
    """`ExpertExchange.exchange_rows`; backward sends the gradients the other way."""
    there = partial(exchange.exchange_rows, gives=gives, takes=takes)
    return by_pair(there, partial(exchange.exchange_rows, gives=takes, takes=gives), rows)


def _by_expert(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Reorder runs of rows from the row order to the column order of `sizes`."""
    runs = rows.split([size for row in sizes for size in row])
    across = len(sizes[0])
    return torch.cat(
        [runs[i] for column in range(across) for i in range(column, len(runs), across)]
    )


def _transposed(sizes: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*sizes, strict=True)]


def _another_layer() -> RequestError:
    return RequestError(
        asked="--strategy expert",
        found="ranks that call the mixtures of the model in different orders, or other ones",
        why="the rows of a layer go to its experts on all ranks: they would be mixed",
        do="let forward call every MixtureOfExperts for every batch, in one order",
    )


# --- routing -------------------------------------------------------------------------------------
# Which experts a token uses, and the balance losses: pure functions of tensors.
#
# Tokens are in groups, runs of rows that do not depend on the number of ranks. Within a group an
# expert accepts `capacity` tokens and drops others: first choices before second ones, and of these
# the first tokens. Of equal probabilities the expert with the lower number is chosen. Lepikhin et
# al. 2020, GShard, arXiv 2006.16668; Fedus et al. 2021, Switch Transformers, arXiv 2101.03961.


@dataclass(frozen=True)
class Chosen:
    """Probabilities, (tokens, experts); chosen experts and gates, (tokens, k), best first.

    `counted` marks tokens that are no padding; `None` means all.
    """

    probabilities: Tensor
    experts: Tensor
    gates: Tensor
    counted: Tensor | None


@dataclass(frozen=True)
class Routed:
    """The rows for experts, sorted by expert, then by group, choice and token.

    `tokens` is the token of each row. `places`, (tokens, k), is the row of each choice of a token;
    dropped choices have the index after the last row.
    """

    tokens: Tensor
    places: Tensor


@dataclass(frozen=True)
class Routes:
    """How many rows each expert gets, (experts,), on the device.

    `order` are all choices, (tokens · k), sorted as rows are; those with `is_kept` become rows.
    """

    counts: Tensor
    order: Tensor
    is_kept: Tensor
    top_k: int

    def rows(self, count: int) -> Routed:
        """The rows; the host knows their count already, and does not wait."""
        if holds(self.order):
            rows = self.order[torch.nonzero_static(self.is_kept, size=count).squeeze(1)]
        else:
            rows = self.order[self.is_kept]
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
    """Assign tokens to experts; `groups` are the sizes of the groups, in order."""
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
    is_kept, sizes = slot < slots, starts.diff().view(experts, len(groups))
    if capacity_factor is not None:
        position = torch.arange(len(order), device=device) - starts[slot]
        limits = capacities(group_sizes(chosen, groups), top_k, experts, capacity_factor)
        is_kept &= position < limits[slot % len(groups)]
        sizes = sizes.minimum(limits)
    return Routes(sizes.sum(1), order, is_kept, top_k)


def capacities(sizes: Tensor, top_k: int, experts: int, factor: float) -> Tensor:
    """How many rows an expert accepts of groups of so many tokens: `factor` times its even share.

    Rounded up, and at least one.
    """
    share = sizes.double() * (factor * top_k / experts)
    return (share - 1e-9).ceil().clamp(min=1).long()


def group_sizes(chosen: Chosen, groups: list[int]) -> Tensor:
    """The number of tokens of each group that are no padding."""
    if chosen.counted is None:
        return tensor_of(groups, chosen.experts.device)
    return torch.stack([part.sum() for part in chosen.counted.split(groups)])


def balance_losses(chosen: Chosen, groups: list[int]) -> Tensor:
    """The balance loss of each group: 1 if experts share it evenly, else more.

    experts · sum over the experts of (its share of choices · its mean probability). Dropped choices
    count, padding does not; a group without tokens has 0.
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
    """For each row of the input, the mean over its tokens of log(sum of exp(logits)), squared.

    Zoph et al. 2022, ST-MoE, arXiv 2202.08906.
    """
    squares = logits.logsumexp(-1).square().view(rows, -1)
    if counted is None:
        return squares.mean(1)
    of_row = counted.view(rows, -1)
    return (squares * of_row).sum(1) / of_row.sum(1).clamp(min=1)


def bound(width: int) -> float:
    """The range of initial weights of a layer with `width` inputs, as in `nn.Linear`."""
    return 1 / math.sqrt(width)


class MixtureOutput(NamedTuple):
    """What a mixture returns: `output` in the shape of the input, and losses of its router.

    `balance` and `z` have a value for each row of dimension 0, that is, each sample. `balance` is
    that of the whole shard, the same for all of its samples, so that the mean over the batch is
    that of one process. The model returns them, and the task adds them to its losses.
    """

    output: Tensor
    balance: Tensor
    z: Tensor


class ExpertLayer(nn.Module):
    """A layer whose experts `--strategy expert` can deal out.

    `experts` is their number in all. The parameters named in `of_experts`, if it has them, have the
    experts as their first dimension. With an `exchange` the layer has those of this rank.
    """

    of_experts: ClassVar[tuple[str, ...]]
    experts: int
    exchange: ExpertExchange | None = None


class MixtureOfExperts(ExpertLayer):
    """A router (`nn.Linear`, softmax, top k) and `experts` MLPs: width -> hidden -> width.

    Takes (samples, …, width), samples first. With a `capacity_factor` an expert takes no more than
    `capacity_factor · top_k · tokens / experts` tokens of a shard in training (`over="sample"`: of
    a sample). Dropped tokens have an output of 0, so use the layer with a residual connection.
    Without a factor, and in evaluation, nothing is dropped. `counted`, (samples, …), marks tokens
    that are no padding: others use no expert and are in no loss. `gated` multiplies the hidden
    features by a second product, as in SwiGLU. Dropout and norms belong before or after the layer.
    """

    of_experts = ("up", "up_bias", "gate", "down", "down_bias")

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        over: Literal["shard", "sample"] = "shard",
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        _check(experts, top_k, capacity_factor, over)
        self.width, self.hidden, self.experts = width, hidden, experts
        self.top_k, self.capacity_factor, self.over = top_k, capacity_factor, over
        self.activation = activation
        self.router = nn.Linear(width, experts, bias=False)
        self.up = _weights(experts, width, hidden, inputs=width)
        self.up_bias = _weights(experts, hidden, inputs=width) if bias else None
        self.gate = _weights(experts, width, hidden, inputs=width) if gated else None
        self.down = _weights(experts, hidden, width, inputs=hidden)
        self.down_bias = _weights(experts, width, inputs=hidden) if bias else None

    def forward(self, input: Tensor, counted: Tensor | None = None) -> MixtureOutput:
        """`output`, `balance` and `z` for (samples, …, width); under `expert` all ranks call it."""
        rows = input.shape[0]
        tokens = input.reshape(-1, self.width)
        mask = None if counted is None else counted.reshape(-1).bool()
        with torch.autocast(input.device.type, enabled=False):  # 16 bits choose other experts
            kind = self.up.dtype
            logits = self.router(tokens.to(kind)).to(full_type(kind))
        rows_of_groups = self._groups(input)
        groups = [count * (len(tokens) // rows) for count in rows_of_groups]
        chosen = to_route = choose(logits, self.top_k, mask)
        if self.exchange is not None and self.exchange.is_idle():
            nothing = torch.zeros(len(tokens), dtype=torch.bool, device=input.device)
            to_route = dataclasses.replace(chosen, counted=nothing)
        routes = route(to_route, groups, self.capacity_factor if self.training else None)
        if self.exchange is None:
            counts: list[int] = routes.counts.tolist()
            routed = routes.rows(sum(counts))
            computed = self._compute(tokens[routed.tokens], counts)
        else:
            sizes_of_ranks = self.exchange.sizes(routes.counts, getattr(self, "index", 0))
            counts = sizes_of_ranks[self.exchange.comm.rank]
            routed = routes.rows(sum(counts))
            picked = tokens[routed.tokens]
            computed = self.exchange.computed(picked, sizes_of_ranks, self._compute)
        computed = torch.cat([computed, computed.new_zeros(1, self.width)])
        output = (computed[routed.places] * chosen.gates[..., None]).sum(1)
        balance = balance_losses(chosen, groups)
        sizes = tensor_of(rows_of_groups, input.device)
        return MixtureOutput(
            output.to(input.dtype).view(input.shape),
            balance.repeat_interleave(sizes, output_size=rows),
            z_losses(logits, mask, rows),
        )

    def _groups(self, input: Tensor) -> list[int]:
        """The rows of dimension 0 of each group, outside of training: all, or one each."""
        return [1] * input.shape[0] if self.over == "sample" else [input.shape[0]]

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The outputs of this layer's experts for rows that are sorted by expert.

        An expert without rows is computed too: its gradient is zero, on any number of ranks.
        """
        per_expert = [p.unbind() for p in (self.up, self.down)]
        gate, up_bias, down_bias = (
            [None] * len(counts) if p is None else p.unbind()
            for p in (self.gate, self.up_bias, self.down_bias)
        )
        outputs = []
        for number, some in enumerate(rows.split(list(counts))):
            up, down = per_expert[0][number], per_expert[1][number]
            hidden = self.activation(_product(some, up, up_bias[number]))
            if (weight := gate[number]) is not None:
                hidden = hidden * _product(some, weight, None)
            outputs.append(_product(hidden, down, down_bias[number]))
        return torch.cat(outputs)


class ShardMixture(OfShard, MixtureOfExperts):
    """Groups by shards, or samples, during a step. Made by `swap_layers`."""

    def _groups(self, input: Tensor) -> list[int]:
        if not (self.training and self.scope.pieces):
            return super()._groups(input)
        rows = self.scope.rows("MixtureOfExperts", input)
        if self.over == "shard":
            return rows
        return [input.shape[0] // self.scope.samples] * self.scope.samples


def _weights(*shape: int, inputs: int) -> nn.Parameter:
    limit = bound(inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-limit, limit))


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)


def _check(experts: int, top_k: int, capacity_factor: float | None, over: str) -> None:
    found = ""
    if not 1 <= top_k <= experts:
        found = f"top_k = {top_k} of {experts} experts"
    elif capacity_factor is not None and not 0 < capacity_factor < float("inf"):
        found = f"capacity_factor = {capacity_factor}"
    elif over not in ("shard", "sample"):
        found = f"over = {over!r}"
    if found:
        raise RequestError(
            asked="MixtureOfExperts",
            found=found,
            why="a token goes to 1 expert or more, all of them at most; the factor is a number "
            "above 0 or None; what is counted are tokens of a shard or of a sample",
            do="for example MixtureOfExperts(64, 256, 8, top_k=2, capacity_factor=1.25)",
        )
