"""`nn.Embedding` and `nn.EmbeddingBag` with a `max_norm`, which renormalise rows in forward.

Torch renormalises the rows that are looked up in place, inside forward. Each of many ranks would
change other rows, and replicas would drift. Here a rank renormalises a row when it first looks it
up in a step. After the gradients are summed, all ranks renormalise the rows that any of them has
looked up: before the update, every table is as one process would have it for the whole batch. Sends
a mark for each row of each such table (kind `rows`). Outside of a step nothing is written: only
the output is renormalised, so an evaluation changes no weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import OfShard, Scope, own_kind

KIND = "rows"
MOST_MARKS = 255  # that a byte can add up


class BoundedTable(OfShard):
    """Shortens the rows of its table once in each step."""

    def rows_for(self, input: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """(indices, table, padding index) in which every looked-up row is renormalised."""
        layer: Any = self
        if layer.training and self.scope.pieces and self.scope.shortens:
            marked = self.scope.looked_up[layer.index]
            rows = input.unique()
            _shorten(layer, layer.weight.detach(), rows[~marked[rows]])
            marked[rows] = True
            return input, layer.weight, layer.padding_idx
        rows, places = input.unique(return_inverse=True)
        table = layer.weight[rows]
        with torch.no_grad():
            _shorten(layer, table.detach(), torch.arange(len(rows), device=rows.device))
        padding = layer.padding_idx
        padding_rows = [] if padding is None else (rows == padding).nonzero().flatten().tolist()
        return places, table, padding_rows[0] if padding_rows else None


class BoundedEmbedding(BoundedTable):
    """Made from an `nn.Embedding` by `swap_tables`."""

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        places, table, padding = self.rows_for(input)
        return F.embedding(
            places, table, padding, None, 2.0, layer.scale_grad_by_freq, layer.sparse
        )


class BoundedBag(BoundedTable):
    """Made from an `nn.EmbeddingBag` by `swap_tables`."""

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        layer: Any = self
        places, table, padding = self.rows_for(input)
        return F.embedding_bag(
            places.to(input.dtype),  # offsets have that type too
            table,
            offsets,
            None,
            2.0,
            layer.scale_grad_by_freq,
            layer.mode,
            layer.sparse,
            per_sample_weights,
            layer.include_last_offset,
            padding,
        )


KINDS: dict[type[nn.Module], type[BoundedTable]] = {
    nn.Embedding: BoundedEmbedding,
    nn.EmbeddingBag: BoundedBag,
}


def swap_tables(model: nn.Module, scope: Scope, names: dict[str, list[str]]) -> None:
    """Swap the tables with a `max_norm` in place; adds their names to `names`."""
    others: dict[int, str] = {}
    bounded: dict[int, tuple[str, Any]] = {}
    names["max_norm"] = []
    for index, (name, module) in enumerate(model.named_modules()):
        kind: Any = own_kind(module)
        base: Any = next((base for base in KINDS if issubclass(kind, base)), None)
        if base is None or getattr(module, "max_norm", None) is None:
            others.update((id(weight), name) for weight in module.parameters(recurse=False))
            continue
        layer: Any = module
        if kind.forward is not base.forward:
            raise _refused(name, f"{kind.__qualname__} has a forward pass of its own", HIDDEN)
        _, first = bounded.setdefault(id(layer.weight), (name, layer))
        if (first.max_norm, first.norm_type) != (layer.max_norm, layer.norm_type):
            raise _refused(name, f"{first.max_norm} in another layer of that table", READS)
        layer.__class__ = type(f"Bounded{kind.__name__}", (KINDS[base], kind), {})
        layer.scope, layer.index = scope, index if first is layer else first.index
        scope.looked_up[layer.index] = torch.zeros(
            len(layer.weight), dtype=torch.bool, device=layer.weight.device
        )
        names["max_norm"].append(name)
    for weight, (name, _) in bounded.items():
        if weight in others:
            reason = f"the table is a weight of {others[weight] or 'the model'!r} too"
            raise _refused(name, reason, READS)


READS = "that would read rows which another rank has yet to shorten"
HIDDEN = "what it looks up cannot be seen"


@torch.no_grad()
def sync_max_norm(model: nn.Module, scope: Scope, comm: Comm) -> None:
    """Renormalise the rows that any rank has looked up; every rank calls this in a step."""
    if comm.size == 1:
        return
    tables = {m.index: m for m in model.modules() if isinstance(m, BoundedTable)}
    for index, layer in tables.items():
        marked = scope.looked_up[index]
        marks = marked.to(torch.uint8 if comm.size <= MOST_MARKS else torch.int32)
        comm.all_reduce(marks, KIND).wait()
        table: Any = layer.weight
        _shorten(layer, table.detach(), ((marks > 0) & ~marked).nonzero().flatten())
        marked.copy_(marks > 0)


def _shorten(layer: Any, table: Tensor, rows: Tensor) -> None:
    """Torch's own kernel, row by row: the same bits whichever rows go with it."""
    if len(rows):
        with torch.no_grad():
            torch.embedding_renorm_(table, rows, layer.max_norm, layer.norm_type)


def _refused(name: str, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"max_norm of the table {name!r}",
        found=found,
        why=f"rows are shortened where they are looked up, and {why}",
        do="shorten the table after each step, in a callback's on_step, with torch.renorm",
    )
