"""A decoder like GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners).

Learned positions, LayerNorm before attention and before the feed-forward part, GELU (tanh form),
and the token embedding used again as the output matrix. From tokens to the logits of the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The sizes of a GPT. `context` is in tokens; `heads` must divide `width`.

    `dropout` is for embeddings and both parts of a block. `attention_dropout` drops attention
    weights, which are then materialized: quadratic memory, a slower kernel.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.vocabulary, self.context, self.width, self.layers, self.heads) < 1:
            raise ValueError(f"a size below 1 in {self}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")


GPT2_124M = GPTShape(vocabulary=50257, context=1024, width=768, layers=12, heads=12)


class GPT(nn.Module):
    """Embeddings, `layers` blocks, a norm; the logits come from the token embedding."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        _initialise(self, shape.layers)

    @property
    def checkpointed_blocks(self) -> list[nn.Module]:
        """The blocks, first to last."""
        return list(self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (n, t), t at most the context -> logits of each next token, (n, t, v)."""
        length, context = tokens.shape[1], self.position_embedding.num_embeddings
        if length > context:
            raise ValueError(f"{length} tokens in a row, and the context is {context}")
        positions = torch.arange(length, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = self.norm(self.blocks(self.drop(x)))
        return F.linear(x, self.token_embedding.weight)


class Block(nn.Module):
    """Attention, then a feed-forward layer of four times the width; both are residual."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        added: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + added


class Attention(nn.Module):
    """Causal attention: each token attends to itself and to earlier tokens.

    The rows of `query_key_value` have the order (head, query | key | value, feature), so that
    consecutive rows are whole heads, as tensor parallelism needs.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.weights_drop = nn.Dropout(shape.attention_dropout)
        self.drop = nn.Dropout(shape.dropout)

    @property
    def tensor_plan(self) -> dict[str, tuple[str, int]]:
        """Cut over ranks by heads."""
        width = self.head_width
        return {"query_key_value": ("column", 3 * width), "output": ("row", width)}

    def forward(self, x: Tensor) -> Tensor:
        rows = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = rows.transpose(1, 2).unbind(3)  # each (n, heads, t, features)
        if self.training and self.weights_drop.p > 0:
            output = self._by_explicit_weights(query, key, value)
        else:
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.drop(self.output(output.transpose(1, 2).flatten(2)))
        return joined

    def _by_explicit_weights(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same by explicit weights: the fused kernel's dropout draws from torch's generator."""
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_width)  # (n, heads, t, t)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
        output: Tensor = self.weights_drop(weights) @ value
        return output


def gpt(shape: GPTShape) -> GPT:
    """A GPT of this shape, with its initial weights."""
    return GPT(shape)


def gpt2_124m() -> GPT:
    """GPT-2, the smallest: 124,439,808 parameters, the output matrix being the token embedding.

    It is the one that the paper calls 117 M, a number that its authors have since corrected.
    """
    return GPT(GPT2_124M)


def _initialise(model: GPT, layers: int) -> None:
    """As GPT-2's paper and code: N(0, 0.02²), 0.01 for positions, biases 0.

    What is added to the residual stream is scaled by 1/√(additions to it), 2 for each block.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.position_embedding.weight, std=0.01)
    for block in model.blocks:
        assert isinstance(block, Block)
        for last in (block.attention.output, block.feed_forward[2]):
            assert isinstance(last, nn.Linear)
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
