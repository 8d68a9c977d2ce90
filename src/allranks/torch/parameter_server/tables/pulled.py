"""`nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`, whose tables are on servers alone.

`pull_tables` takes the weight of such a layer away and lets its forward pull the rows that are
looked up, each once (`lookups`). What it computes is torch's own kernel on those rows. A row that
is only looked up as `padding_idx` travels for its numbers, and never gets a gradient. Several
layers may share a table: their gradients add up. What another row than the touched ones would
follow is refused: `max_norm`, a table that is a weight of another layer too, an own forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.model.layers import Swapped, own_kind
from allranks.torch.parameter_server.tables.lookups import Lookups
from allranks.torch.parameter_server.tables.row_table import TablePlan


class PulledTable(Swapped):
    """A layer without its table; its own class is the second base."""

    plan: TablePlan
    lookups: Lookups
    trained: bool

    @property
    def weight(self) -> Tensor:
        raise _refused(
            self.plan.name,
            "forward, loss or a regularizer reads the whole table",
            "it is on the servers, and a worker has the rows that it looked up",
            "look rows up by the layer; or --strategy ps:tables=whole",
        )

    def rows_for(self, input: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """(places, rows, padding place): the rows that `input` looks up, and where in them."""
        layer: Any = self
        ids, places = input.unique(return_inverse=True)
        ids = ids.long()
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.plan.rows:
            raise IndexError(
                f"index out of range in self: table {self.plan.name!r} has rows 0 to "
                f"{self.plan.rows - 1}, and {int(ids[0])} to {int(ids[-1])} is asked"
            )
        padding = layer.padding_idx
        found = [] if padding is None else (ids == padding).nonzero().flatten().tolist()
        place = found[0] if found else None
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
    for one that cannot be. The model may lie on meta.
    """
    return {name: plan for name, plan, _ in _layers(model)}


def pull_tables(
    model: nn.Module, lookups: Lookups, names: Collection[str] | None = None
) -> dict[str, TablePlan]:
    """Take these tables out of `model`, in place; its layers pull rows by `lookups` from then on.

    All of them, or those of these `names`, which are returned. The parameter stays where it is,
    with no rows, so that the model has the parameters that it has elsewhere. Nothing here reads a
    table, so that the model may lie on meta.
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
    """(name of the parameter, its plan, the layers that look up in it)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[int, list[tuple[str, nn.Module, bool]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            is_table = attribute == "weight" and _is_table(module)
            users.setdefault(id(parameter), []).append((name, module, is_table))
    for key, found in users.items():
        if not any(is_table for _, _, is_table in found):
            continue
        for name, module, is_table in found:
            _check(names[key], name, module, is_table)
        layers: list[Any] = [module for _, module, _ in found]
        rows, dim = layers[0].num_embeddings, layers[0].embedding_dim
        yield names[key], TablePlan(names[key], rows, dim, layers[0].weight.dtype), layers


def _is_table(module: nn.Module) -> bool:
    return issubclass(own_kind(module), tuple(KINDS)) and getattr(module, "sparse", False) is True


def _check(table: str, name: str, layer: Any, is_table: bool) -> None:
    """Raise `RequestError` for a layer that needs more of its table than the rows it looks up."""
    kind: Any = own_kind(layer)
    if not is_table:
        found = f"it is a weight of {name or 'the model'!r} too, a {kind.__name__}"
        raise _refused(table, found, "that reads, or changes, the whole of it", DENSE)
    base: Any = next(base for base in KINDS if issubclass(kind, base))
    if kind.forward is not base.forward or "forward" in vars(layer):
        found = f"{kind.__qualname__} has a forward of its own"
        raise _refused(table, found, "what it looks up cannot be seen", DENSE)
    if layer.max_norm is not None:
        found = f"max_norm={layer.max_norm} at {name!r}"
        raise _refused(table, found, "torch shortens rows in forward, before any update", DENSE)
    if layer.scale_grad_by_freq:
        found = f"scale_grad_by_freq=True at {name!r}"
        raise _refused(table, found, "torch has it for dense gradients alone", DENSE)
    if getattr(layer, "mode", "sum") == "max":
        found = f"mode='max' at {name!r}"
        raise _refused(table, found, "torch has it for dense gradients alone", DENSE)


DENSE = "take that away; or --strategy ps:tables=whole, where it is as any other weight"


def _refused(table: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(
        asked=f"the table {table!r} on parameter servers", found=found, why=why, do=do
    )
