"""The plan for tensor parallelism that a model of transformers brings, as blocks of `tensor`.

    colwise, rowwise                    the columns and the row of a block
    replicated_with_grad_allreduce      a norm of each head, between them

Queries, keys and values of attention are cut by groups: a head of keys and the heads of queries
that read it. Layers of other styles, and modules of which the plan names more than such layers, are
cut as those of any model are. So are those of an MLP that is more than the sum of its features, as
one that takes a mean over them. Dropout by function within a block would follow the number of
ranks, so a model that drops anything has no blocks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from allranks.errors import RequestError
from allranks.torch.parallel.tensor.plan import COLUMN, ROW, WITHIN, can_be_cut

STYLES = {"colwise": COLUMN, "rowwise": ROW, "replicated_with_grad_allreduce": WITHIN}
"""The styles of layers in a block, and the way of each."""

OTHER_STYLES = (
    *("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"),
    *("embedding_rowwise", "embedding_colwise", "replicate", "sequence_parallel", "all_reduce"),
    *("packed_colwise", "packed_rowwise", "local_params", "mla_kv_a_proj"),
    *("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts"),
)
"""Styles whose layers are cut by themselves, or whole on every rank: the result is the same."""

MOST_COLUMNS = 2  # of a block without heads: a gate and its factor


def offer_blocks(model: nn.Module) -> None:
    """Set `tensor_plan` on the modules that the plan of the model makes blocks.

    Raises `RequestError` for a style that is not known.
    """
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    plan: dict[str, str] = dict((parts[0]._tp_plan if parts else None) or {})
    for name, style in plan.items():
        if style not in (*STYLES, *OTHER_STYLES):
            raise RequestError(
                asked="--strategy tensor by the plan of the model (base_model_tp_plan, _tp_plan)",
                found=f"{name}: {style!r}, a style that is not known",
                why="it may say that a layer needs more than to be cut into parts",
                do="write tensor_plan(self, model) in the task; return None there to cut each "
                "layer by itself",
            )
    settings = [setting for part in parts for setting in vars(part.config).items()]
    if not plan or any("drop" in name and bool(rate) for name, rate in settings):
        return
    styles = {
        name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        for name, _ in (*parts[0].named_modules(), *parts[0].named_parameters())
    }
    for name, module in parts[0].named_modules():
        prefix = f"{name}." if name else ""
        below = {n: style for n, style in styles.items() if style and n.startswith(prefix) and n}
        block = _block_of(module, {n.removeprefix(prefix): style for n, style in below.items()})
        if block:
            module.tensor_plan = block


def _block_of(module: nn.Module, styles: Mapping[str, str]) -> dict[str, Any]:
    """How the layers of a block are cut, by name; empty if the module is none."""
    ways = {child: STYLES.get(style) for child, style in styles.items()}
    children = dict(module.named_children())
    if not {*ways} <= {*children} or None in ways.values() or [*module.parameters(False)]:
        return {}
    columns, rows = ([n for n, way in ways.items() if way == kind] for kind in (COLUMN, ROW))
    others = [child for name, child in children.items() if name not in ways]
    if not columns or len(rows) != 1 or any([*child.parameters()] for child in others):
        return {}
    layers: dict[str, Any] = {name: children[name] for name in (*columns, *rows)}
    if not all(isinstance(layer, nn.Linear) and can_be_cut(layer) for layer in layers.values()):
        return {}
    sizes = {n: m.in_features if n in rows else m.out_features for n, m in layers.items()}
    width = getattr(module, "head_dim", None)
    groups = min(sizes.values()) // width if width else 0
    if groups and not any(size % groups for size in sizes.values()):
        cuts: dict[str, Any] = {n: (ways[n], size // groups) for n, size in sizes.items()}
    elif not width and len(columns) <= MOST_COLUMNS and len({*sizes.values()}) == 1:
        cuts = {name: ways[name] for name in layers}
    else:
        return {}
    if not groups and not _adds_up(module, columns, rows[0]):
        return {}
    return {**cuts, **{name: WITHIN for name in children if name not in layers}}


def _adds_up(module: nn.Module, columns: list[str], row: str) -> bool:
    """Whether what a block makes of single features adds up, by trying 8 in a copy."""
    random = torch.Generator().manual_seed(0)
    some = torch.empty(len(columns) + 2, 8, 4, dtype=torch.float64, device="cpu")
    inputs, *weights = some.normal_(generator=random)

    def output(features: slice) -> Any:
        part = copy.copy(module)
        part._modules = dict(module._modules)
        for name, weight in zip((*columns, row), weights, strict=True):
            part._modules[name] = layer = nn.Linear(4, 8, bias=False, device="meta")
            of_features = weight[features].T if name == row else weight[features]
            layer.weight = nn.Parameter(of_features)
        return part.forward(inputs[None])

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            parts = torch.stack([output(slice(i, i + 1)) for i in range(8)])
            return torch.allclose(output(slice(8)), parts.sum(0), 1e-5, 1e-5)  # some use float32
    except Exception:  # forward needs more than an input, or the sizes of the model
        return False
