"""One layer to be cut over the tensor axis: the ways to cut, and which layers can be cut.

column       rows of weight and bias: some of the output's features
row          columns of the weight: a part of every sum
vocabulary   rows of a table
heads        rows of query, key and value that belong to some heads      `.attention`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from allranks.torch.model.layers import own_kind
from allranks.torch.parallel.tensor.exchange import Along, part_sizes

COLUMN, ROW, VOCABULARY, HEADS = "column", "row", "vocabulary", "heads"
WAYS: dict[str, type[nn.Module]] = {
    COLUMN: nn.Linear,
    ROW: nn.Linear,
    VOCABULARY: nn.Embedding,
    HEADS: nn.MultiheadAttention,
}
DIMS = {
    COLUMN: {"weight": Along(0), "bias": Along(0)},
    ROW: {"weight": Along(1)},
    VOCABULARY: {"weight": Along(0)},
    HEADS: {
        **{"in_proj_weight": Along(0, runs=3), "in_proj_bias": Along(0, runs=3)},
        **{f"{name}_proj_weight": Along(0) for name in "qkv"},
    },
}
"""By way: how each parameter is cut."""

LENGTHS = {
    **{COLUMN: "out_features", ROW: "in_features"},
    **{VOCABULARY: "num_embeddings", HEADS: "embed_dim"},
}
"""By way: the attribute of a layer with the length that is cut."""


@dataclass
class LayerCut:
    """One layer to be cut. `block` is the first layer of its block, if it is in one."""

    name: str
    module: Any  # a Linear, an Embedding or an attention
    way: str
    unit: int = 1
    block: str | None = None

    @property
    def size(self) -> int:
        """How many features or rows there are along the dimension that is cut."""
        return int(getattr(self.module, LENGTHS[self.way]))

    @property
    def units(self) -> int:
        return self.size // self.unit

    def fits(self, ranks: int, *, even: bool = False) -> bool:
        """Whether every rank gets a part, with `even` an equal one, and no unit is divided."""
        whole = even or self.unit > 1 or self.way == HEADS
        if whole and (self.size % self.unit or self.units % ranks):
            return False
        return part_sizes(self.size, ranks)[-1] > 0


def can_be_cut(module: nn.Module) -> bool:
    """Whether a layer is a plain, unmodified Linear or Embedding."""
    if own_kind(module) not in (nn.Linear, nn.Embedding) or "forward" in vars(module):
        return False
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False  # weight normalisation keeps it under another name
    special = ("max_norm", "sparse", "scale_grad_by_freq")
    return not any(getattr(module, name, None) for name in special)


def has_heads(module: nn.Module) -> bool:
    """Whether a layer is torch's own attention, whose heads are independent.

    One with an additional key and value (`add_bias_kv`, `add_zero_attn`) is not cut.
    """
    if own_kind(module) is not nn.MultiheadAttention or "forward" in vars(module):
        return False
    attention: Any = module
    output = attention.out_proj
    if own_kind(output) is not NonDynamicallyQuantizableLinear or "forward" in vars(output):
        return False
    names = ["in_proj_weight"] if attention._qkv_same_embed_dim else []
    names = names or [f"{name}_proj_weight" for name in "qkv"]
    held_weights = [attention._parameters.get(name) for name in names]
    held_weights.append(output._parameters.get("weight"))
    if not all(isinstance(weight, nn.Parameter) for weight in held_weights):
        return False
    return attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn


def by_heads(name: str, attention: Any) -> list[LayerCut]:
    """The block of attention: its input projections and its output projection."""
    unit, out = attention.head_dim, f"{name}.out_proj" if name else "out_proj"
    return [LayerCut(name, attention, HEADS, unit), LayerCut(out, attention.out_proj, ROW, unit)]
