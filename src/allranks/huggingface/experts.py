"""Experts of transformers for `--strategy expert`: one module with the tensors of all of them.

    gate_up_proj    (experts, 2 · hidden, width)
    down_proj       (experts, width, hidden)

A router calls the module with the experts of each token and their weights. Rows go to the ranks of
their experts and back; there transformers' own forward computes them.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.parallel.expert.mixture import ExpertLayer

TENSORS = ("gate_up_proj", "down_proj")
ARGUMENTS = 3  # rows, their experts and weights; in Llama 4 rows come sorted, without a choice


class StackedExperts(ExpertLayer):
    """The experts of this rank; made of a module of transformers, whose class is the second base.

    Every rank calls it for its own tokens, in every pass.
    """

    of_experts = TENSORS
    index: int
    num_experts: int  # of this rank; of all before an exchange is there

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(tokens, width), and the experts and weights of each, (tokens, k) -> (tokens, width)."""
        forward: Any = super().forward
        if self.exchange is None:
            return cast("Tensor", forward(hidden, chosen, weights))
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        if self.exchange.is_idle():
            order = order[:0]
        tokens = order // chosen.shape[1]
        counts = experts[order].bincount(minlength=self.experts)[: self.experts]
        sizes = self.exchange.sizes(counts, self.index)
        if sum(sizes[self.exchange.comm.rank]) < len(order):
            raise RequestError(
                asked="--strategy expert",
                found=f"a router that chose an expert above the last one, {self.experts - 1}",
                why="it has no weights: what it does is written in the model alone",
                do="--strategy ddp or fsdp",
            )

        def compute(rows: Tensor, counts: Any) -> Tensor:
            """The outputs of this rank's experts for rows that are sorted by expert."""
            if not len(rows):  # they have a gradient on every rank all the same
                weights_of_none: list[Tensor] = [getattr(self, name)[:0].sum() for name in TENSORS]
                return rows + torch.stack(weights_of_none).sum()
            self.num_experts = len(counts)
            numbers = torch.arange(len(counts), device=rows.device)
            repeats = torch.tensor(counts, device=rows.device)
            expert = numbers.repeat_interleave(repeats)[:, None]
            return cast("Tensor", forward(rows, expert, rows.new_ones(expert.shape)))

        outputs = self.exchange.computed(hidden[tokens], sizes, compute)
        weighted = outputs * weights.flatten()[order][:, None]
        return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))


def swap_experts(model: nn.Module) -> None:
    """Let each module whose weights are the two tensors of experts be `StackedExperts`."""
    for number, module in enumerate(model.modules()):
        tensors = dict(module.named_parameters())
        experts: Any = getattr(module, "num_experts", None)
        if isinstance(module, StackedExperts) or {*tensors} != {*TENSORS}:
            continue
        if any(len(tensor) != experts for tensor in tensors.values()):
            continue
        if len(inspect.signature(module.forward).parameters) != ARGUMENTS:
            continue
        layer: Any = module
        kind = type(module)
        layer.__class__ = type(f"Stacked{kind.__name__}", (StackedExperts, kind), {})
        layer.experts, layer.index = experts, number
