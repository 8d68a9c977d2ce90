"""`nn.MultiheadAttention` with its heads cut over the tensor axis.

    in_proj_weight    rows of this rank's heads, of query, key and value each    (3 · e/N, e)
    in_proj_bias      the same rows                                                  (3 · e/N)
    out_proj.weight   columns of this rank's heads: a part of every sum       (e, e/N)

In between, a rank computes the attention of its heads and sends nothing. A block sends its output,
and in backward the gradient of its input. Attention weights that a caller wants (`need_weights`,
torch's default) are summed or gathered over the ranks; `need_weights=False` sends none. Dropout
draws for each head the same numbers as one process. Shoeybi et al. 2019, Megatron-LM,
arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from allranks.errors import RequestError
from allranks.torch.parallel.tensor.exchange import Joined
from allranks.torch.parallel.tensor.layers import CutLayer, Region, RowLinear, aligned
from allranks.torch.parallel.tensor.scattered import ScatteredExchange
from allranks.torch.random.torch_functions import bernoulli_of_part

BATCHED = 3  # dimensions of (sample, position, feature)
HEADS_DIM = 1  # of (sample, head, query, key)


class HeadsOutput(RowLinear, NonDynamicallyQuantizableLinear):
    """`out_proj`: the columns of this rank's heads. Closes the region of the heads."""


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a call. `mask` is added to the scores of this rank's heads.

    It is (1 or n, 1 or heads, queries, keys), or `None` for no mask or a purely causal one.
    """

    mask: Tensor | None
    is_causal: bool
    weights: bool

    def of_heads(self, start: int, heads: int) -> Tensor | None:
        """The mask of some of this rank's heads."""
        if self.mask is None or self.mask.shape[HEADS_DIM] == 1:
            return self.mask
        return self.mask.narrow(HEADS_DIM, start, heads)


class HeadsOfAttention(CutLayer, nn.MultiheadAttention):
    """Some heads of attention. Input and output are full, and the same on all ranks."""

    region: Region

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """`False`, so that no layer of torch passes full weights to a kernel in evaluation."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`."""
        is_batched = query.dim() == BATCHED
        samples = 0 if self.batch_first or not is_batched else 1
        inputs = [query, key, value]
        if not is_batched:
            batched = {id(tensor): tensor.unsqueeze(0) for tensor in inputs}
            inputs = [batched[id(tensor)] for tensor in inputs]
        leaves = [self._by_heads(some, samples) for some in self._projected(*inputs)]
        options = self._options(
            leaves[0], attn_mask, key_padding_mask, causal=is_causal, need_weights=need_weights
        )
        outputs, weights = self._attended(leaves, options)
        joined = [
            heads.permute(0, 2, 1, 3) if samples == 0 else heads.permute(2, 0, 1, 3)
            for heads in outputs
        ]
        flat = [heads.flatten(2) for heads in joined]
        features = flat[0] if len(flat) == 1 else Joined.apply(*flat)  # type: ignore[no-untyped-call]
        output = self.out_proj(features)
        if not need_weights:
            return output if is_batched else output.squeeze(0), None
        shown = self._whole_weights(weights, average=average_attn_weights)
        return (output, shown) if is_batched else (output.squeeze(0), shown.squeeze(0))

    # --- columns --------------------------------------------------------------------------

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[list[Tensor]]:
        """Queries, keys and values of this rank's heads, for each leaf."""
        packed, bias = self.part("in_proj_weight"), self.part("in_proj_bias")
        if packed is not None and query is key and key is value:
            return [list(p.chunk(3, -1)) for p in self._products(query, packed, bias, runs=3)]
        if packed is None:
            weights: Sequence[Any] = [self.part(f"{name}_proj_weight") for name in "qkv"]
        else:
            weights = packed.chunk(3)
        biases: Sequence[Tensor | None] = [None] * 3 if bias is None else bias.chunk(3)
        triples = zip((query, key, value), weights, biases, strict=True)
        products = [self._products(x, weight, bias, runs=1) for x, weight, bias in triples]
        return [list(leaf) for leaf in zip(*products, strict=True)]

    def _products(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, *, runs: int
    ) -> list[Tensor]:
        """The features of this rank's heads, for each leaf; `weight` has so many `runs`."""
        exchange, region = self.exchange, self.region
        if isinstance(exchange, ScatteredExchange) and exchange.lies_along(self, input):
            return [region.enter_rows(exchange, input).linear(weight, bias)]
        copies = region.enter(input)
        if not exchange.leaves:
            return [F.linear(copies[0], weight, bias)]

        def leaf(rows: Tensor, at: int) -> Tensor:
            return aligned(rows.unflatten(0, (runs, len(copies), -1))[:, at].flatten(0, 1))

        return [
            F.linear(copy, leaf(weight, at), None if bias is None else leaf(bias, at))
            for at, copy in enumerate(copies)
        ]

    def _by_heads(self, some: list[Tensor], samples: int) -> list[Tensor]:
        """Each as (n, heads, positions, features of a head)."""
        order = (0, 2, 1, 3) if samples == 0 else (1, 2, 0, 3)
        return [part.unflatten(-1, (-1, self.head_dim)).permute(order) for part in some]

    # --- heads ----------------------------------------------------------------------------

    def _attended(
        self, leaves: list[list[Tensor]], options: AttentionOptions
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Attention of this rank's heads, leaf by leaf, and its weights if they are computed."""
        keeps, outputs, weights, start = self._dropout_mask(leaves, options), [], [], 0
        for query, key, value in leaves:
            heads = query.shape[HEADS_DIM]
            mask = options.of_heads(start, heads)
            if keeps is None and not options.weights:
                outputs.append(
                    F.scaled_dot_product_attention(
                        query, key, value, mask, is_causal=options.is_causal and mask is None
                    )
                )
            else:
                some = _softmax(query, key, mask, as_kernel=not options.weights)
                if keeps is not None:
                    some = some * keeps.narrow(HEADS_DIM, start, heads).to(some.dtype)
                weights.append(some)
                outputs.append(some @ value)
            start += heads
        return outputs, weights

    def _dropout_mask(self, leaves: list[list[Tensor]], options: AttentionOptions) -> Tensor | None:
        """The dropout mask for the weights of this rank's heads; `None` if dropout is off."""
        if not self._draws():
            return None
        query, key = leaves[0][:2]
        n, sizes = query.shape[0], (query.shape[2], key.shape[2])
        mask: Tensor
        region, rate = self.region, 1 - self.dropout
        if options.weights:  # one process draws for (n · heads) rows here
            shape = n * region.units, *sizes
            rows = bernoulli_of_part(query.new_empty(shape), rate, shape)
            mask = rows.unflatten(0, (n, -1)).narrow(HEADS_DIM, region.start, region.local_units)
        else:
            like = query.new_empty(n, region.local_units, *sizes)
            mask = bernoulli_of_part(like, rate, (n, region.units, *sizes), region.start)
        return mask / rate if rate else mask

    def _whole_weights(self, leaves: list[Tensor], *, average: bool) -> Tensor:
        """The weights of all heads, or their mean, over the ranks."""
        if not average:
            return self.exchange.whole(torch.cat(leaves, HEADS_DIM), HEADS_DIM, self.num_heads)
        parts = [some.sum(HEADS_DIM) / self.num_heads for some in leaves]
        if self.exchange.leaves:
            return self.exchange.summed_leaves(parts)
        return self.exchange.summed(parts[0])

    # --- masks ----------------------------------------------------------------------------

    def _options(
        self,
        some: list[Tensor],
        mask: Tensor | None,
        padding: Tensor | None,
        *,
        causal: bool,
        need_weights: bool,
    ) -> AttentionOptions:
        """Combine both masks; `causal` is a hint that `mask` is causal.

        Raises `RequestError` for masks that `nn.MultiheadAttention` refuses.
        """
        like, key = some[:2]
        n, queries, keys = like.shape[0], like.shape[2], key.shape[2]
        if causal and mask is None:
            raise _no_mask("is_causal=True without attn_mask", "attn_mask says what is causal")
        if causal and padding is None and not need_weights and not self._draws():
            return AttentionOptions(None, True, need_weights)
        added = None
        if mask is not None:
            many = (n * self.num_heads, queries, keys)
            if mask.shape not in ((queries, keys), many):
                found = f"attn_mask of shape {tuple(mask.shape)}"
                raise _no_mask(found, f"it is {(queries, keys)} or {many}")
            rows = mask.unsqueeze(0) if mask.dim() < BATCHED else mask
            heads = self.num_heads if len(rows) > 1 else 1
            added = _added(rows, like.dtype).unflatten(0, (-1, heads))
            if heads > 1:
                added = added.narrow(HEADS_DIM, self.region.start, self.region.local_units)
        if padding is not None:
            if padding.numel() != n * keys:
                found = f"key_padding_mask of shape {tuple(padding.shape)}"
                raise _no_mask(found, f"it is {(n, keys)}")
            of_keys = _added(padding, like.dtype).view(n, 1, 1, keys)
            added = of_keys if added is None else added + of_keys
        return AttentionOptions(added, False, need_weights)

    def _draws(self) -> bool:
        return self.training and self.dropout > 0


def _softmax(query: Tensor, key: Tensor, mask: Tensor | None, *, as_kernel: bool) -> Tensor:
    """Attention weights; fully masked queries get zeros if the kernel would give zeros."""
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    if not as_kernel:
        return scores.softmax(-1)
    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores; in a boolean mask, True means masked."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _no_mask(found: str, why: str) -> RequestError:
    return RequestError(
        asked="nn.MultiheadAttention whose heads are cut over the ranks",
        found=found,
        why=f"torch refuses it, too: {why}",
        do="call it as nn.MultiheadAttention says",
    )
