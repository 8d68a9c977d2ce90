"""Tasks for context parallelism: rotary positions, torch's encoder, models it must refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import tensor_tasks
from allranks.programs.models.gpt import Block, GPTShape, gpt
from allranks.torch import MixtureOfExperts
from allranks.training.callback import Callback
from contract_tasks import SAMPLES, Sentences

__all__ = ["Sentences"]


@dataclass(kw_only=True)
class Odd(Sentences):
    """A length that no number of ranks divides, and few heads; a penalty on the weights."""

    tokens: int = 11
    heads: int = 4

    def regularizer(self, model: nn.Module) -> Tensor:
        table: Any = model.get_submodule("token_embedding")
        weight: Tensor = table.weight
        return 1e-2 * weight.square().sum().sqrt()


class Rotary(Sentences):
    """Rotary positions, a mask and keys of fewer heads, handed to blocks that share a weight."""

    def model(self) -> nn.Module:
        return _Rotary(self.vocabulary, "cos")


@dataclass(kw_only=True)
class Between(Sentences):
    """A mean over time between blocks, behind a gate of zero; positions by sample, of which the
    last batch has as many as a sample has positions."""

    tokens: int = SAMPLES % 24

    def model(self) -> nn.Module:
        return _Rotary(self.vocabulary, "between")


class Halved(Sentences):
    """Two runs of blocks, the second on every other position of what the first returns."""

    def model(self) -> nn.Module:
        return _Halved(self.vocabulary)


class _Halved(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary)
        shape = GPTShape(vocabulary=vocabulary, context=1, width=16, layers=1, heads=4, dropout=0.1)
        self.fine = nn.ModuleList(Block(shape) for _ in range(2))
        self.coarse = nn.ModuleList([Block(shape)])

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.fine:
            x = block(x)
        y = self.coarse[0](x[:, ::2])
        found: Tensor = self.out(x + y.repeat_interleave(2, 1))
        return found


class Coupled(Sentences):
    """A loss over the whole batch: each sample is compared with the mean of all."""

    loss_over = "batch"

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        pooled = output.mean(1)
        far = (pooled - pooled.mean(0)).square().sum(-1, keepdim=True)
        return super().loss(output, batch) + far


@dataclass(kw_only=True)
class Refused(Sentences):
    """A block that is another one on a part of the sequence, in the way that `fault` names."""

    fault: str

    def model(self) -> nn.Module:
        if self.fault == "dropout of weights":
            shape = GPTShape(
                vocabulary=self.vocabulary,
                context=self.tokens,
                width=12,
                layers=2,
                heads=self.heads,
                attention_dropout=0.1,
            )
            return gpt(shape)
        model = _Rotary(self.vocabulary, self.fault)
        if self.fault == "let in later":
            for block in model.blocks:
                block.get_parameter("gate").requires_grad_(False)
        return model

    def callbacks(self) -> list[Callback]:
        return [_LetsIn()] if self.fault == "let in later" else []


class _LetsIn(Callback):
    """Gates are trained from the second step on."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        for block in trainer.strategy.model.blocks:
            block.gate.requires_grad_(True)


BETWEEN = "between", "beside blocks"


class _Rotary(nn.Module):
    """Two blocks that are given positions, mask and a shared scale; `fault` spoils them."""

    def __init__(self, vocabulary: int, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(vocabulary, 16)
        scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(_RotaryBlock(scale, fault) for _ in range(2))
        self.scale, self.calls = scale, 0
        self.gate = nn.Parameter(torch.zeros(())) if fault in BETWEEN else None
        self.out = nn.Linear(16, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        x, length = self.embedding(text), text.shape[1]
        first = x
        angles = torch.arange(length, dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0]).to(x)
        mask = (
            torch.ones(length, length, dtype=torch.bool)
            .tril()
            .logical_or(
                torch.rand(length, length, generator=torch.Generator().manual_seed(1)) < 0.2
            )
        )
        self.calls += self.fault == "layout"
        if self.fault == "between":
            angles = angles.expand(len(text), 1, -1, -1)
        elif self.fault == "layout" and self.calls > 4:
            angles = angles[None]
        for number, block in enumerate(self.blocks):
            if self.fault == "skips" and number and torch.rand(()) < 0.5:
                continue
            x = block(x, (angles.cos(), angles.sin()), mask)
            if self.fault == "between" and number == 0:
                x = x + self.gate * x.mean(1, keepdim=True)
            first = x if number == 0 else first
        if self.fault == "beside blocks":
            x = x + self.gate * first.mean(1, keepdim=True)
        found: Tensor = self.out(x * self.scale)
        return found


class _RotaryBlock(nn.Module):
    def __init__(self, scale: nn.Parameter, fault: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if fault == "batch norm" else nn.LayerNorm(16)
        self.query, self.key_value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop, self.scale, self.fault = nn.Dropout(0.1), scale, fault
        self.mixed = nn.Conv1d(16, 16, 3, padding=1)
        self.gate = nn.Parameter(torch.zeros(()))  # hides in forward what is behind it
        if fault == "capacity":
            self.experts = MixtureOfExperts(16, 16, 4, top_k=1, capacity_factor=1.0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        fault, length = self.fault, x.shape[1]
        hidden = self.norm(x * self.scale)
        query = self.query(hidden).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.key_value(hidden).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        if fault == "own positions":
            angles = torch.arange(length, dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0]).to(x)
            turns = angles.cos(), angles.sin()
        if fault == "own mask":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        if fault == "counts":
            self.get_buffer("seen").add_(1)
        rate = 0.1 if fault == "drops weights" else 0.0
        query, key = turned(query, turns), turned(key, turns)
        if fault == "attention written out":
            key, value = (one.repeat_interleave(2, 1) for one in (key, value))
            found = (query @ key.transpose(-2, -1) / 2).softmax(-1) @ value
        else:
            found = F.scaled_dot_product_attention(query, key, value, mask, rate, enable_gqa=True)
        x = x + self.drop(found.transpose(1, 2).flatten(2))
        if fault == "capacity":
            x = x + self.experts(x).output
        if fault in ("convolution", "let in later"):
            x = x + self.gate * self.mixed(x.transpose(1, 2)).transpose(1, 2)
        if fault == "dropout by function":
            x = F.dropout(x, 0.1, self.training)
        return x


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turns
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Encoder(tensor_tasks.Encoder):
    """Torch's own encoder layers, which attend by `nn.MultiheadAttention`; a causal mask."""

    def model(self) -> nn.Module:
        model: Any = _Causal(self.vocabulary)
        for layer in model.layers.layers:  # a bias of keys cancels: its gradient is rounding alone
            layer.self_attn.in_proj_bias.requires_grad_(False)
        return model  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class _Causal(tensor_tasks._Encoder):
    def forward(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text)
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], dtype=x.dtype)
        found: Tensor = self.out(self.layers(x, mask=mask))
        return found
