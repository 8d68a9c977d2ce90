"""What runs in the ranks of tests/test_context.py: attention over parts of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from allranks.launcher.world import World
from allranks.torch.comm.comm import CPU
from allranks.torch.comm.join import join
from allranks.torch.parallel.context import attention
from allranks.torch.parallel.context.attention import Intercepted, attention_of
from allranks.torch.parallel.context.exchange import ROWS, ContextExchange

SAMPLES, FEATURES = 2, 5
CASES: list[dict[str, Any]] = [
    {"is_causal": True},
    {},
    {"is_causal": True, "scale": 0.3},
    {"mask": "bool"},
    {"mask": "float", "per_head": True},
    {"is_causal": True, "enable_gqa": True},
]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_is_that_of_one_process(argument: dict[str, Any]) -> None:
    """Output and gradients of all cases, against torch's own kernel over the whole sequence."""
    torch.set_num_threads(1)
    attention.TILE = 3  # so that the rows of a rank are more than one tile
    comm = join(World.from_environment(), CPU)
    exchange = ContextExchange(comm, folds=argument["by"] == "zig-zag")
    length = argument["length"]
    span = exchange.span_of(length)
    for case in CASES:
        options = dict(case)
        heads, fewer = 2 * comm.size, comm.size if options.get("enable_gqa") else 2 * comm.size
        whole = [
            drawn(seed, SAMPLES, count, length, FEATURES).requires_grad_()
            for seed, count in enumerate((heads, fewer, fewer))
        ]
        per_head = heads if options.pop("per_head", False) else 1
        if (kind := options.pop("mask", None)) is not None:
            mask = drawn(7, SAMPLES, per_head, length, length)
            seen = mask > -0.5
            options["attn_mask"] = seen | torch.eye(length).bool() if kind == "bool" else mask
        wanted = F.scaled_dot_product_attention(*whole, **options)
        gradient = drawn(9, *wanted.shape)
        grads = torch.autograd.grad(wanted, whole, gradient)
        own = [span.own_part(one.detach(), ROWS).clone().requires_grad_() for one in whole]
        with Intercepted(attention_of(argument["by"], exchange, span)):
            found = torch.nn.functional.scaled_dot_product_attention(*own, **options)
        parts = torch.autograd.grad(found, own, span.own_part(gradient, ROWS).contiguous())
        for one, all_of_it in zip((found, *parts), (wanted, *grads), strict=True):
            off = (one - span.own_part(all_of_it, ROWS)).norm() / all_of_it.norm()
            assert off < 1e-12, (case, argument, float(off))
    comm.leave()


def scores_are_counted(argument: dict[str, Any]) -> None:
    """Of rank r of P, in forward and backward: r + 1 blocks round a ring, and 2P + 1 of a quarter
    of their size where the sequence lies folded. Blocks on the diagonal are computed whole."""
    comm, length, counted = join(World.from_environment(), CPU), 64, [0]
    folds = argument["by"] == "zig-zag"
    exchange = ContextExchange(comm, folds=folds)
    span, plain = exchange.span_of(length), attention.Scoring.of

    def counting(*given: Any) -> Tensor:
        scores = plain(*given)
        counted[0] += scores.numel()
        return scores

    own = [drawn(seed, 1, 1, span.local, FEATURES).requires_grad_() for seed in range(3)]
    attention.Scoring.of = counting  # type: ignore[method-assign]
    try:
        attention_of(argument["by"], exchange, span)(*own, is_causal=True).sum().backward()
    finally:
        attention.Scoring.of = plain  # type: ignore[method-assign]
    part = span.local // 2 if folds else span.local
    blocks = 2 * comm.size + 1 if folds else comm.rank + 1
    assert counted[0] == 2 * blocks * part * part, (comm.rank, counted)
    comm.leave()
