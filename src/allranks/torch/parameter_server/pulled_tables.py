"""`nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`, whose tables are on servers only.

`pull_tables` removes the weight of such a layer. Its forward pulls the rows of its input, each once
(`Lookups`), and runs torch's kernel on them. The row of `padding_idx` is pulled but never gets a
gradient. Several layers may share a table: their gradients add up. Refused is what could change or
read other rows: `max_norm`, a table that is also a weight of another layer, a custom forward.

The rows of each lookup are one leaf of autograd. A row is pulled once between two pushes: a second
lookup, of that table or in another micro-batch, uses the cached row. After the backward passes the
gradients of all lookups of a table are added in the order of the lookups, and only these rows are
pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.model.layers import Swapped, own_kind
from allranks.torch.parameter_server.row_table import TablePlan, sum_rows

PullRows = Callable[[str, Tensor], Tensor]
"""Returns the current rows (n, dim) of the table of this name, for ids (n,) int64, strictly
increasing. All tensors are on the host."""


@dataclass(frozen=True)
class Lookup:
    """One lookup: rows `ids` as a leaf. The row at index `padding` gets no gradient."""

    ids: Tensor
    leaf: Tensor
    padding: int | None

    def gradient(self) -> tuple[Tensor, Tensor] | None:
        """(ids, gradient) of the rows without padding; `None` before backward."""
        if self.leaf.grad is None:
            return None
        ids, gradient = self.ids, self.leaf.grad.cpu()
        if self.padding is None:
            return ids, gradient
        others = torch.arange(len(ids)) != self.padding
        return ids[others], gradient[others]


class Lookups:
    """The rows that a worker has pulled, and the lookups whose gradients it has not pushed.

    Calls `used` with the name of a table when backward has reached a lookup of it.
    """

    def __init__(self, pull: PullRows, used: Callable[[str], None] = lambda table: None) -> None:
        self._pull, self._used = pull, used
        self._cached: dict[str, tuple[Tensor, Tensor]] = {}
        self._looked: dict[str, list[Lookup]] = {}

    def rows_of(self, plan: TablePlan, ids: Tensor) -> Tensor:
        """The rows (n, dim) on the device of `ids`; pulls those that are not cached."""
        return self._values(plan, ids.cpu()).to(ids.device)

    def leaf(self, plan: TablePlan, ids: Tensor, padding: int | None) -> Tensor:
        """The same as a leaf whose gradient will be pushed, without the row at `padding`."""
        leaf = self.rows_of(plan, ids)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(lambda _: self._used(plan.name))
            self._looked.setdefault(plan.name, []).append(Lookup(ids.cpu(), leaf, padding))
        return leaf

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each table (ids, gradient) of the rows that backward has reached; clears all."""
        gradients = {}
        for table, lookups in self._looked.items():
            parts = [part for lookup in lookups if (part := lookup.gradient()) is not None]
            if parts:
                gradients[table] = sum_rows(parts)
        self.forget()
        return gradients

    def forget(self) -> None:
        """Clear the lookups and the cache: rows may be out of date."""
        self._cached.clear()
        self._looked.clear()

    def _values(self, plan: TablePlan, ids: Tensor) -> Tensor:
        """A new copy of the rows."""
        none = torch.empty(0, dtype=torch.int64), torch.empty(0, plan.dim, dtype=plan.kind)
        known, values = self._cached.get(plan.name, none)
        missing = ids[~torch.isin(ids, known, assume_unique=True)]
        if len(missing):
            pulled = self._pull(plan.name, missing)
            if not len(known):
                known, values = missing, pulled
            else:
                known, order = torch.cat([known, missing]).sort()
                values = torch.cat([values, pulled])[order]
            self._cached[plan.name] = known, values
        return values[torch.searchsorted(known, ids)]


class PulledTable(Swapped):
    """A layer without its table; its original class is the second base."""

    plan: TablePlan
    lookups: Lookups
    trained: bool

    @property
    def weight(self) -> Tensor:
        raise _refused(
            self.plan.name,
            "forward, loss or a regularizer reads the whole table",
            "it is on the servers; a worker has only the rows that it looked up",
            "look rows up by the layer; or --strategy ps:tables=whole",
        )

    def rows_for(self, input: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """(places, rows, padding place): the rows for `input`, and its indices in them."""
        layer: Any = self
        ids, places = input.unique(return_inverse=True)
        ids = ids.long()
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.plan.rows:
            raise IndexError(
                f"index out of range in self: table {self.plan.name!r} has rows 0 to "
                f"{self.plan.rows - 1}, and {int(ids[0])} to {int(ids[-1])} is asked"
            )
        padding = layer.padding_idx
        places_of_padding = [] if padding is None else (ids == padding).nonzero().flatten().tolist()
        place = places_of_padding[0] if places_of_padding else None
        if not self.trained:
            return places, self.lookups.rows_of(self.plan, ids), place
        return places, self.lookups.leaf(self.plan, ids, place), place


class PulledEmbedding(PulledTable):
    """Made from an `nn.Embedding` by `pull_tables`."""

    def forward(self, input: Tensor) -> Tensor:
        places, rows, padding = self.rows_for(input)
        return F.embedding(places, rows, padding)


class PulledBag(PulledTable):
    """Made from an `nn.EmbeddingBag` by `pull_tables`."""

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        layer: Any = self
        places, rows, padding = self.rows_for(input)
        return F.embedding_bag(
            places.to(input.dtype),  # offsets have that type too
            rows,
            offsets,
            mode=layer.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=padding,
        )


KINDS: dict[type[nn.Module], type[PulledTable]] = {
    nn.Embedding: PulledEmbedding,
    nn.EmbeddingBag: PulledBag,
}


def find_tables(model: nn.Module) -> dict[str, TablePlan]:
    """The tables of `model` that servers can hold, by the name of their parameter.

    Those of every `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`. Raises `RequestError`
    for one that servers cannot hold. The model may be on meta.
    """
    return {name: plan for name, plan, _ in _layers(model)}


def pull_tables(
    model: nn.Module, lookups: Lookups, names: Collection[str] | None = None
) -> dict[str, TablePlan]:
    """Remove these tables from `model`, in place; its layers then pull rows through `lookups`.

    Removes and returns all tables, or those of these `names`. The parameters stay, with no rows, so
    that the model has the same parameters as in other processes. Nothing here reads a table, so
    the model may be on meta.
    """
    plans = {}
    for name, plan, layers in list(_layers(model)):
        if names is not None and name not in names:
            continue
        plans[name] = plan
        weight = layers[0].weight
        for layer in layers:
            kind: Any = own_kind(layer)
            base = next(base for base in KINDS if issubclass(kind, base))
            layer.__class__ = type(f"Pulled{kind.__name__}", (KINDS[base], kind), {})
            layer.plan, layer.lookups, layer.trained = plan, lookups, weight.requires_grad
        weight.data = weight.data.new_empty(0, plan.dim)
    return plans


def _layers(model: nn.Module) -> Iterator[tuple[str, TablePlan, list[Any]]]:
    """(name of the parameter, its plan, the layers which use it)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[int, list[tuple[str, nn.Module, bool]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            is_table = attribute == "weight" and _is_table(module)
            users.setdefault(id(parameter), []).append((name, module, is_table))
    for key, uses in users.items():
        if not any(is_table for _, _, is_table in uses):
            continue
        for name, module, is_table in uses:
            _check(names[key], name, module, is_table)
        layers: list[Any] = [module for _, module, _ in uses]
        rows, dim = layers[0].num_embeddings, layers[0].embedding_dim
        yield names[key], TablePlan(names[key], rows, dim, layers[0].weight.dtype), layers


def _is_table(module: nn.Module) -> bool:
    return issubclass(own_kind(module), tuple(KINDS)) and getattr(module, "sparse", False) is True


def _check(table: str, name: str, layer: Any, is_table: bool) -> None:
    """Raise `RequestError` for a layer that needs more of its table than the rows it looks up."""
    kind: Any = own_kind(layer)
    if not is_table:
        found = f"it is a weight of {name or 'the model'!r} too, a {kind.__name__}"
        raise _refused(table, found, "that layer reads or changes the whole table", DENSE)
    base: Any = next(base for base in KINDS if issubclass(kind, base))
    if kind.forward is not base.forward or "forward" in vars(layer):
        found = f"{kind.__qualname__} has a forward of its own"
        raise _refused(table, found, "the engine cannot see which rows it uses", DENSE)
    if layer.max_norm is not None:
        found = f"max_norm={layer.max_norm} at {name!r}"
        raise _refused(table, found, "torch shortens rows in forward, before any update", DENSE)
    if layer.scale_grad_by_freq:
        found = f"scale_grad_by_freq=True at {name!r}"
        raise _refused(table, found, "torch has it for dense gradients alone", DENSE)
    if getattr(layer, "mode", "sum") == "max":
        found = f"mode='max' at {name!r}"
        raise _refused(table, found, "torch has it for dense gradients alone", DENSE)


DENSE = "remove that; or --strategy ps:tables=whole, which treats it like any other weight"


def _refused(table: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(
        asked=f"the table {table!r} on parameter servers", found=found, why=why, do=do
    )
