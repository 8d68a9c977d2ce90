"""Attention over the whole sequence, for blocks that call `scaled_dot_product_attention`.

While a block computes a rank's positions, this function is intercepted
(`torch.overrides.TorchFunctionMode`: in this thread, however it was imported), also within
`nn.MultiheadAttention`.

    ulysses   all-to-all to some heads of all positions, torch's own kernel, all-to-all back
    ring      keys and values travel round the ranks                     `ring_attention`
    zig-zag   the same, with a folded sequence                           `Span.of`

Ring attention has one tile of scores in memory at a time. Each rank has its own queries. For each
query it keeps a maximum and a sum of exponentials, and rescales its output when a larger score
comes. In backward keys and values go round once more. Their gradients go with them, and each rank
adds its part, until they are back home. A message is under way during the computation of the block
before it. With a causal mask blocks above the diagonal are passed on and not computed. Then the
last rank has the most work, except with a folded sequence (`zig-zag`): a rank has an early and a
late part, and its queries see half of the keys of any other. Sums are in float32 for half types.

Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509; Liu et al. 2023, Ring Attention, arXiv
2310.01889; the softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; balanced sequences: Brandon
et al. 2023, Striped Attention, arXiv 2311.09431, and Llama 3, arXiv 2407.21783, section 3.3.2, with
two parts per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from allranks.errors import RequestError
from allranks.torch.parallel.context.exchange import (
    HEADS,
    ROWS,
    ContextExchange,
    RingMessage,
    Span,
    Stretch,
)

KEYS, GRADIENTS = 1, 2  # tags of messages
TILE = 1024  # queries of one tile, whose scores by the keys of a rank are in memory


@dataclass(frozen=True)
class Scoring:
    """Computes scores from queries and keys; `mask` is that of the whole sequence."""

    exchange: ContextExchange
    span: Span
    scale: float
    is_causal: bool
    mask: Tensor | None

    def pairs(self, source: int) -> list[tuple[Stretch, Stretch]]:
        """(queries, keys) of this rank and of rank `source` that attend to each other."""
        ours, others = (
            [stretch for stretch in self.span.stretches[rank] if stretch.length]
            for rank in (self.span.rank, source)
        )
        return [
            (mine, theirs)
            for mine in ours
            for theirs in others
            if theirs.start <= mine.start or not self.is_causal
        ]

    def of(self, query: Tensor, key: Tensor, rows: Stretch, theirs: Stretch) -> Tensor:
        """The scores of some queries, those of the positions `rows`, by keys of `theirs`."""
        scores = (query @ key.transpose(-2, -1)) * self.scale  # (n, heads, rows, keys)
        if self.is_causal and rows.start < theirs.start + theirs.length:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill_(ahead.triu_(rows.start - theirs.start + 1), -math.inf)
        if self.mask is None:
            return scores
        mask = _part(_part(self.mask, -2, rows), -1, theirs)
        if mask.dtype == torch.bool:
            return scores.masked_fill_(mask.logical_not(), -math.inf)
        return scores + mask

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(rank, its keys, its values) of each rank in turn, this one first, then those before it.

        All ranks of the axis must iterate to the end.
        """
        ranks, rank = len(self.span.sizes), self.span.rank
        outgoing = torch.cat([key.reshape(-1), value.reshape(-1)])
        for step in range(ranks):
            source = (rank - step) % ranks
            coming = None
            if step + 1 < ranks:
                size = self.size(key, source - 1) + self.size(value, source - 1)
                coming = self.exchange.pass_on(outgoing, size, KEYS)
            yield source, *self.split(outgoing, key, value, source)
            outgoing = outgoing if coming is None else coming.wait()

    def size(self, like: Tensor, rank: int) -> int:
        """The size of a rank's part of a tensor `like` this."""
        return math.prod(self.shape(like, rank))

    def shape(self, like: Tensor, rank: int) -> tuple[int, ...]:
        n, heads, _, features = like.shape
        return n, heads, self.span.sizes[rank % len(self.span.sizes)], features

    def split(self, flat: Tensor, key: Tensor, value: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Split a flat tensor into the shapes of the keys and the values of a rank."""
        first = self.size(key, rank)
        keys, values = flat[:first], flat[first:]
        return keys.view(self.shape(key, rank)), values.view(self.shape(value, rank))


def _part(mask: Tensor, dim: int, some: Stretch) -> Tensor:
    """The part of a mask for some positions; a dimension of size 1 stays."""
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, some.start, some.length)


def ring_attention(scoring: Scoring, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of this rank's queries over the keys and values of all ranks.

    All of (n, heads, t/P, d); queries may have more heads, in groups. Every rank calls this.
    """
    output: Tensor = _Ring.apply(scoring, query, key, value)  # type: ignore[no-untyped-call]
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scoring: Scoring, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            output, logs = _forward(scoring, query, key, value)
        ctx.scoring = scoring
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with torch.autocast(gradient.device.type, enabled=False):
            return None, *_backward(ctx.scoring, gradient, *ctx.saved_tensors)


def _forward(scoring: Scoring, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and for each query the logarithm of its sum of exponentials."""
    groups, wide = query.shape[HEADS] // key.shape[HEADS], _wide(query)
    output = wide.new_zeros(*query.shape[:-1], value.shape[-1])
    most = wide.new_full((*query.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(most)
    for source, keys, values in scoring.blocks(key, value):
        pairs = scoring.pairs(source)
        if pairs:
            keys, values = _repeated(keys, groups), _repeated(values, groups)
        for mine, theirs in pairs:
            some_keys, some_values = _of(keys, theirs), _of(values, theirs)
            for rows in _tiles(mine):
                scores = scoring.of(_of(wide, rows), some_keys, rows, theirs)
                before = _of(most, rows)
                larger = torch.maximum(before, scores.amax(-1, keepdim=True))
                reference = larger.masked_fill(larger == -math.inf, 0.0)  # no key so far
                weights, factor = (scores - reference).exp_(), (before - reference).exp_()
                _of(total, rows).mul_(factor).add_(weights.sum(-1, keepdim=True))
                _of(output, rows).mul_(factor).add_(weights @ some_values)
                before.copy_(larger)
    divisor = total.masked_fill(total == 0, 1.0)
    return output / divisor, most + divisor.log()


def _backward(
    scoring: Scoring,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logs: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    groups = query.shape[HEADS] // key.shape[HEADS]
    wide, gradient = _wide(query), _wide(gradient)
    share = (_wide(output) * gradient).sum(-1, keepdim=True)
    logs = logs.masked_fill(logs == -math.inf, math.inf)  # a query without keys has weights 0
    of_query, local, coming = torch.zeros_like(wide), wide.new_empty(0), None
    for source, keys, values in scoring.blocks(key, value):
        added, pairs = wide.new_zeros(keys.numel() + values.numel()), scoring.pairs(source)
        if pairs:
            keys, values = _repeated(keys, groups), _repeated(values, groups)
            of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
            for mine, theirs in pairs:
                some_keys, some_values = _of(keys, theirs), _of(values, theirs)
                for rows in _tiles(mine):
                    ours, gradients = _of(wide, rows), _of(gradient, rows)
                    scores = scoring.of(ours, some_keys, rows, theirs)
                    weights = scores.sub_(_of(logs, rows)).exp_()
                    of_scores = gradients @ some_values.transpose(-2, -1) - _of(share, rows)
                    of_scores = of_scores.mul_(weights).mul_(scoring.scale)
                    _of(of_query, rows).add_(of_scores @ some_keys)
                    _of(of_keys, theirs).add_(of_scores.transpose(-2, -1) @ ours)
                    _of(of_values, theirs).add_(weights.transpose(-2, -1) @ gradients)
            parts = [_summed(part, groups).reshape(-1) for part in (of_keys, of_values)]
            added = torch.cat(parts)
        if source == scoring.span.rank:
            local = added
            continue
        if coming is not None:
            added += coming.wait()
        coming = _to_the_next(scoring, added, key, value, source)
    if coming is not None:
        local = local + coming.wait()
    of_key, of_value = scoring.split(local, key, value, scoring.span.rank)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _to_the_next(
    scoring: Scoring, added: Tensor, key: Tensor, value: Tensor, source: int
) -> RingMessage:
    """Send the gradients of the keys and values of `source`; receive those of the rank before."""
    size = scoring.size(key, source - 1) + scoring.size(value, source - 1)
    return scoring.exchange.pass_on(added, size, GRADIENTS)


def _tiles(mine: Stretch) -> Iterator[Stretch]:
    """The tiles of a stretch of queries."""
    for first in range(0, mine.length, TILE):
        length = min(TILE, mine.length - first)
        yield Stretch(mine.start + first, length, mine.at + first)


def _of(tensor: Tensor, some: Stretch) -> Tensor:
    """Some of a rank's positions, as a view: (n, heads, positions, …)."""
    return tensor.narrow(ROWS, some.at, some.length)


def _wide(tensor: Tensor) -> Tensor:
    """In the type of sums, at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    """Repeated for each head of the queries, in the type of sums."""
    return _wide(tensor if groups == 1 else tensor.repeat_interleave(groups, HEADS))


def _summed(tensor: Tensor, groups: int) -> Tensor:
    """The sum over the heads of the queries that share a head of the keys."""
    return tensor if groups == 1 else tensor.unflatten(HEADS, (-1, groups)).sum(HEADS + 1)


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
