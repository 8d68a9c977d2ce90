"""Tasks for `sequence=yes`: blocks as those of Llama, which look at another sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from context_tasks import Odd, turned
from contract_tasks import Sentences
from pipeline_tasks import grouped

__all__ = ["Odd", "Sentences"]
PROVED = 4  # more passes than the proof makes
WIDTH, HEADS, PAIRS, HIDDEN = 16, 4, 2, 24
PLAN = {
    "*.query": ("column", WIDTH // HEADS),
    "*.key": ("column", WIDTH // HEADS),
    "*.value": ("column", WIDTH // HEADS),
    "*.output": ("row", WIDTH // HEADS),
    "*.gate": "column",
    "*.up": "column",
    "*.down": "row",
    "blocks.*.column.0": "column",
    "blocks.*.row.0": "row",
    "embedding": "vocabulary",
    "out": "column",
}


@dataclass(kw_only=True)
class Gated(Sentences):
    """Rotary positions and a mask that all blocks are given whole, RMSNorm, a gated feed-forward
    part, attention to another sequence, layers that are cut by themselves; a scale and a norm that
    the blocks share. 11 positions."""

    fault: str = ""
    tokens: int = 11

    def model(self) -> nn.Module:
        return _Gated(self.vocabulary, self.fault)

    def eval_data(self) -> Tensor:
        return self.train_data()[:10, : self.tokens]  # one position less

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return PLAN

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        target = batch[:, 1 : output.shape[1] + 1]
        return F.cross_entropy(output.transpose(1, 2), target, reduction="none")


class Scaled(Sentences):
    """Blocks with a weight of no dimension; stages of which the ends share the table of tokens."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.blocks = nn.Sequential(*(_Scaled(block) for block in model.blocks))
        return model

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        parts = [_Tokens(model), *model.blocks, _Head(model)]
        return grouped([nn.Sequential(*parts[:2]), *parts[2:]], count)


class UnitsWithin(Scaled):
    """What is gathered at a time is a part of a block."""

    def fsdp_units(self, model: Any) -> Sequence[nn.Module]:
        return [block.block for block in model.blocks]


class HalfBlocks(Scaled):
    """No stage has a whole block: what each does beside its parts is left out."""

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        halves = [
            half
            for scaled in model.blocks
            for half in (scaled.block.attention, scaled.block.feed_forward)
        ]
        norms = [scaled.block.attention_norm for scaled in model.blocks]
        norms += [scaled.block.feed_forward_norm for scaled in model.blocks]
        gains = _Gains([scaled.gain for scaled in model.blocks])
        return grouped([_Tokens(model), *halves, *norms, gains, _Head(model)], count)


class _Gains(nn.Module):
    def __init__(self, gains: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.gains = nn.ParameterList(gains)

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return x


class _Scaled(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.gain = block, nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.block(x) * self.gain
        return scaled


class _Tokens(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.positions = model.token_embedding, model.position_embedding
        self.drop = model.drop

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.drop(
            self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        )
        return found


class _Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.norm = model.token_embedding, model.norm

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.tokens.weight)


class _Gated(nn.Module):
    def __init__(self, vocabulary: int, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.summary = nn.Linear(WIDTH, WIDTH)
        scale, norm = nn.Parameter(torch.ones(WIDTH)), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(_Block(scale, norm, fault) for _ in range(2))
        if fault == "shared weight":
            self.scale = scale
        if fault == "stranger":
            bias = nn.Parameter(torch.zeros(WIDTH))
            self.bias = bias
            for block in self.blocks:
                vars(block)["hidden"] = [bias]
        self.out = nn.Linear(WIDTH, vocabulary)
        self.passes = 0

    def forward(self, text: Tensor) -> Tensor:
        if self.fault == "as long later":
            self.passes += 1
            text = text[:, : 8 if self.passes > PROVED else None]
        x, length = self.embedding(text), text.shape[1]
        angles = torch.arange(length, dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0]).to(x)
        turns = angles.cos(), angles.sin()
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        first = {"as long": length // 2 + 1, "as long later": 3}.get(self.fault, 4)
        memory = torch.tanh(self.summary(x[:, :first]))
        for block in self.blocks:
            x = block(x, turns, mask, memory)
        found: Tensor = self.out(x * self.scale if self.fault == "shared weight" else x)
        return found


class _Block(nn.Module):
    def __init__(self, scale: nn.Parameter, norm: nn.Module, fault: str) -> None:
        super().__init__()
        self.attend, self.look = _Attention(), _Attention()
        self.norm, self.other_norm, self.last_norm = norm, nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down, self.drop = nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.1)
        self.column, self.row = (nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.scale, self.fault = scale, fault
        self.zero = nn.Parameter(torch.zeros(()))  # hides in forward what is behind it

    def forward(
        self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, memory: Tensor
    ) -> Tensor:
        hidden = self.norm(x * self.scale)
        x = x + self.drop(self.attend(hidden, hidden, turns, mask))
        hidden = self.other_norm(x)
        if self.fault == "gradient of an argument":
            x = x + memory.mean(1, keepdim=True)
        elif self.fault == "a gate of zero":
            x = x + self.zero * memory.mean(1, keepdim=True)
        elif self.fault == "a layer behind a gate of zero":
            x = x + self.zero * self.column(memory.detach().mean(1, keepdim=True))
        else:
            if self.fault == "as long later":
                memory = torch.cat([memory, memory[:, :1]], 1)
            x = x + self.drop(self.look(hidden, memory, None, None))
        hidden = self.last_norm(x)
        x = x + self.down(self.drop(F.silu(self.gate(hidden)) * self.up(hidden)))
        x = x + self.row(torch.tanh(self.column(x)))
        if self.fault == "mean over time":
            x = x + self.zero * x.mean(1, keepdim=True)
        if self.fault == "stranger":
            x = x + vars(self)["hidden"][0]
        if self.fault == "dropout by function":
            x = F.dropout(x, 0.1, self.training)
        return x


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # one would cancel
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, other: Tensor, turns: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> Tensor:
        query, key, value = (
            layer(one).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer, one in ((self.query, x), (self.key, other), (self.value, other))
        )
        if turns is not None:
            query, key = turned(query, turns), turned(key, turns)
        found = F.scaled_dot_product_attention(query, key, value, mask)
        output: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return output
