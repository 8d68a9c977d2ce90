"""The tables of a task on the servers of a job, and how rows lie in a message.

    | ids: int64, rising | rows, or their gradient: (n, dim) as they lie |

All processes come to the same tables from the same model. A table has a number, its place in the
list, and a position, that of its parameter among those that the optimizer updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.launcher.messages.connection import Buffer
from allranks.torch.deferred_init.recorded import Recorded
from allranks.torch.parameter_server.tables.pulled import find_tables
from allranks.torch.parameter_server.tables.row_optimizers import rule_name
from allranks.torch.parameter_server.tables.row_table import TablePlan

ID_BYTES = 8


@dataclass(frozen=True)
class PlacedTable:
    """A table, the position of its parameter, its rule, and the group of the optimizer."""

    position: int
    plan: TablePlan
    rule: str
    group: int


def placed_tables(
    model: nn.Module, names: Sequence[str], optimizer: Optimizer
) -> list[PlacedTable]:
    """The tables among the parameters of these `names`, in their order.

    A table that is not trained stays whole in every process. Raises `RequestError` for a table, or
    an optimizer of it, that servers cannot do row by row.
    """
    found, weights = find_tables(model), dict(model.named_parameters())
    for name in found:
        if name not in names and weights[name].requires_grad:
            raise RequestError(
                asked=f"the table {name!r} on parameter servers",
                found="a parameter that requires a gradient, and that the optimizer has not",
                why="rows on servers are updated there, or the table is frozen and everywhere",
                do="give it to the optimizer, or weight.requires_grad_(False)",
            )
    groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    return [
        PlacedTable(
            at,
            found[name],
            rule_name(optimizer, weights[name], name),
            next(n for n, held in enumerate(groups) if id(weights[name]) in held),
        )
        for at, name in enumerate(names)
        if name in found
    ]


def without_rows(model: nn.Module, recorded: Recorded) -> Recorded:
    """How all but the tables of a model that lies on meta is computed: these have no rows here.

    A process that has a model so never holds a table whole, however it is initialised.
    """
    weights = dict(model.named_parameters())
    tables = {name for name in find_tables(model) if weights[name].requires_grad}
    for name in tables:
        weights[name].data = weights[name].data.new_empty(0, *weights[name].shape[1:])
    views = {name: view for name, view in recorded.views.items() if name not in tables}
    empty = {name: torch.empty(weights[name].shape, dtype=weights[name].dtype) for name in tables}
    return replace(recorded, views=views, given={**recorded.given, **empty})


def most_bytes(tables: Sequence[PlacedTable], servers: int) -> int:
    """No message about tables to or from one server is larger: all its rows, and their state."""
    widest = max((4 * table.plan.bytes + ID_BYTES * table.plan.rows for table in tables), default=0)
    return widest // servers + (1 << 16)


def body_of(ids: Tensor, rows: Tensor) -> list[Buffer]:
    """The body of a message with these rows; with no columns, of the ids alone."""
    return [numbers_of(ids), numbers_of(rows)] if rows.numel() else [numbers_of(ids)]


def numbers_of(tensor: Tensor) -> Buffer:
    """The bytes of a tensor on the host, where they lie if it is contiguous."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def ids_in(body: memoryview, count: int) -> Tensor:
    """The ids of a message, in memory of their own."""
    return torch.frombuffer(body, dtype=torch.int64, count=count).clone()


def rows_in(body: memoryview, count: int, width: int, kind: torch.dtype, start: int = 0) -> Tensor:
    """(count, width) numbers from byte `start` of a body on, in memory of their own."""
    end = start + count * width * kind.itemsize
    if not count or not width:
        return torch.empty(count, width, dtype=kind)
    raw = torch.frombuffer(body[start:end], dtype=torch.uint8).clone()
    return raw.view(kind).view(count, width)


def let_go(parameter: nn.Parameter, optimizer: Optimizer) -> None:
    """This process has no rows of that table, and nothing that the optimizer keeps for it."""
    parameter.data = parameter.data.new_empty(0, *parameter.shape[1:])
    optimizer.state.pop(parameter, None)
