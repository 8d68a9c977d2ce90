"""Attention over the whole sequence, for blocks that call `scaled_dot_product_attention`.

While a block computes a rank's positions, this function is intercepted
(`torch.overrides.TorchFunctionMode`: in this thread, however it was imported), also within
`nn.MultiheadAttention`.

    ulysses   all-to-all to some heads of all positions, torch's own kernel, all-to-all back
    ring      keys and values travel round the ranks                                   `ring`
    zig-zag   the same, with a folded sequence                                         `Span.of`

Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from allranks.errors import RequestError
from allranks.torch.parallel.context.exchange import HEADS, ROWS, ContextExchange, Span
from allranks.torch.parallel.context.ring import Scoring, ring_attention

DIMS = 4  # (sample, head, position, feature)
KERNEL = F.scaled_dot_product_attention
Attention = Callable[..., Tensor]


class Intercepted(TorchFunctionMode):
    """Within, calls of attention go to `attention`."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is KERNEL:
            return self.attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:  # it runs with this mode off
            F.scaled_dot_product_attention = self.attention
            try:
                return func(*args, **(kwargs or {}))
            finally:
                F.scaled_dot_product_attention = KERNEL
        return func(*args, **(kwargs or {}))


def attention_of(by: str, exchange: ContextExchange, span: Span) -> Attention:
    """The attention that replaces the kernel for a sequence with this `span`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _check(by, span, (query, key, value), attn_mask, dropout_p)
        if by != "ulysses":
            scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            scoring = Scoring(exchange, span, scale, is_causal, attn_mask)
            return ring_attention(scoring, query, key, value)
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _ulysses(exchange, span, (query, key, value), attn_mask, options)

    return attention


def _ulysses(
    exchange: ContextExchange,
    span: Span,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of some heads over all positions; each rank has as many heads as any other."""
    if mask is not None and mask.ndim == DIMS and mask.shape[HEADS] > 1:
        mask = mask.chunk(len(span.sizes), HEADS)[span.rank]
    query, key, value = inputs
    if query.shape[:-1] == key.shape[:-1] == value.shape[:-1]:  # in one message
        widths = [tensor.shape[-1] for tensor in inputs]
        query, key, value = exchange.to_heads(torch.cat(inputs, -1), span).split(widths, -1)
    else:
        query, key, value = (exchange.to_heads(tensor, span) for tensor in inputs)
    return exchange.to_rows(KERNEL(query, key, value, attn_mask=mask, **options), span)


def _check(
    by: str,
    span: Span,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
) -> None:
    """Raise `RequestError` for attention that would differ from that over the whole sequence."""
    ranks, shapes = len(span.sizes), [tuple(tensor.shape) for tensor in inputs]
    if any(len(shape) != DIMS or shape[ROWS] != span.local for shape in shapes):
        raise _refused(
            f"attention of shapes {', '.join(map(str, shapes))}",
            f"it is over the sequence itself: (sample, head, {span.local} positions of this rank, "
            "feature), of queries, keys and values alike",
            "attention over something else outside of the blocks, or --strategy ddp",
        )
    if dropout > 0:
        raise _refused(
            f"scaled_dot_product_attention with dropout_p={dropout}",
            "it would draw another mask on each number of ranks",
            "dropout_p=0, and nn.Dropout on what comes out",
        )
    heads = [shape[HEADS] for shape in shapes]
    if by == "ulysses" and any(count % ranks for count in heads):
        raise _refused(
            f"{' and '.join(map(str, sorted(set(heads))))} heads of attention on {ranks} ranks",
            "each rank takes as many heads as any other",
            f"ranks that divide {math.gcd(*heads)}, or attention=ring",
        )
    if mask is not None:
        _check_mask(by, span, mask)


def _check_mask(by: str, span: Span, mask: Tensor) -> None:
    sides = mask.shape[-2:]
    if mask.ndim < 2 or any(side not in (1, span.whole) for side in sides):
        raise _refused(
            f"a mask of shape {tuple(mask.shape)} for {span.whole} positions",
            "a mask is that of the whole sequence: a rank that makes one itself, from its own "
            f"{span.local} positions, knows nothing of the others",
            "is_causal=True, or hand the whole mask to each block",
        )
    if by != "ulysses" and mask.requires_grad:
        raise _refused(
            "a mask that is trained",
            "the ring sends keys, values and their gradients, and none of masks",
            "attention=ulysses",
        )


def _refused(found: str, why: str, do: str) -> RequestError:
    return RequestError(asked="--strategy context", found=found, why=why, do=do)
