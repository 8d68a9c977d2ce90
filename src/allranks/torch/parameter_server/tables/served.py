"""The tables of a task on the servers of a job, and what one server does with its rows.

All processes come to the same tables from the same model. A table has a number, its place in the
list, and a position, that of its parameter among those that the optimizer updates. In a message:

    | ids: int64, rising | rows, or their gradient: (n, dim) as they lie |

A worker sends the rows of all tables that it has touched, then its dense gradient; that one counts
or does not, and the rows with it: so a part that comes twice is counted once, in tables too. The
caller of `ServedTables` holds the lock of the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.launcher.messages.connection import Buffer
from allranks.launcher.nodes.channel import Message
from allranks.torch.parameter_server.tables.pulled import find_tables
from allranks.torch.parameter_server.tables.row_table import (
    RowTable,
    TablePlan,
    rule_name,
    settings_of,
)

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


def leave_rows(tables: Iterable[nn.Parameter]) -> None:
    """This process has no rows of those that are trained: they lie on servers."""
    for table in tables:
        if table.requires_grad:
            table.data = table.data.new_empty(0, *table.shape[1:])


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


Groups = Sequence[Mapping[str, Any]]
Held = list[tuple[int, Tensor, Tensor]]


class ServedTables:
    """The rows of all `tables` on server `index` of `servers`."""

    def __init__(
        self, tables: Sequence[PlacedTable], optimizer: Optimizer, index: int, servers: int
    ) -> None:
        self.placed = list(tables)
        self._first = [settings_of(group) for group in optimizer.param_groups]
        self.tables = [
            RowTable(one.plan, one.rule, index, servers, self._first[one.group]) for one in tables
        ]
        self.most_bytes = most_bytes(tables, servers)
        """No message about rows here is larger."""
        self._held: dict[int, Held] = {}

    # --- workers --------------------------------------------------------------------------

    def pull(self, asked: Message, body: memoryview) -> Tensor:
        """The rows that a worker asks for: (count, dim)."""
        return self.tables[int(asked["table"])].pull(ids_in(body, int(asked["count"])))

    def hold(self, who: int, brought: Message, body: memoryview) -> None:
        """A worker has touched rows; they count with what it pushes next."""
        number, count = int(brought["table"]), int(brought["count"])
        plan = self.tables[number].plan
        gradient = rows_in(body, count, plan.dim, plan.kind, count * ID_BYTES)
        self._held.setdefault(who, []).append((number, ids_in(body, count), gradient))

    def drop(self, who: int) -> None:
        """What a worker has touched does not count."""
        self._held.pop(who, None)

    def bring(self, who: int, part: int) -> None:
        """In step: it is that part of the step."""
        for number, ids, gradient in self._held.pop(who, ()):
            self.tables[number].add(ids, gradient, part)

    def push(self, who: int, groups: Groups, slower: float, unused: Collection[int]) -> None:
        """Out of step: it is applied at once, at the rate over `slower`."""
        held = {number: (ids, gradient) for number, ids, gradient in self._held.pop(who, ())}
        for number, (one, table) in enumerate(zip(self.placed, self.tables, strict=True)):
            if one.position in unused:
                continue
            group = self._group(one, groups)
            group["lr"] = group["lr"] / slower
            if number in held:
                table.add(*held[number], part=0)
            table.apply(group)

    # --- the scheduler --------------------------------------------------------------------

    def squares(self, unused: Collection[int]) -> float:
        """The sum of the squares of the gradients of all rows here."""
        there = zip(self.placed, self.tables, strict=True)
        return sum(table.squares() for one, table in there if one.position not in unused)

    def scale(self, factor: float) -> None:
        """The gradient of the step is `factor` times itself from here on."""
        for table in self.tables:
            table.scale(factor)

    def apply(self, factor: float, groups: Groups, unused: Collection[int]) -> None:
        """Update the rows that a part of the step has touched; the step is over.

        A table that is `unused` by all samples of a step counts no step.
        """
        for one, table in zip(self.placed, self.tables, strict=True):
            if one.position not in unused:
                table.apply(self._group(one, groups), factor)
        self.forget()

    def forget(self) -> None:
        """The step is over, or not made at all."""
        for table in self.tables:
            table.forget()

    def load(self, said: Message, body: memoryview) -> None:
        """Begin anew with these rows, and with their state, if any is given."""
        one, table = self.placed[int(said["table"])], self.tables[int(said["table"])]
        plan, ids, at = table.plan, table.ids(), 0
        table.forget()
        self._held.clear()
        table.state = table.rule.state_for(len(ids), plan.dim, plan.kind, self._first[one.group])
        widths = {"": plan.dim, **{name: table.state[name].shape[1] for name in said["columns"]}}
        found = {}
        for name, width in widths.items():
            found[name] = rows_in(body, len(ids), width, plan.kind, at)
            at += found[name].nbytes
        table.put(ids, found.pop(""), found)
        table.step = int(said["step"])

    def fetch(self, number: int, *, with_state: bool) -> tuple[Message, list[Buffer]]:
        """All rows of a table that are here, and their state, as `load` takes them."""
        table = self.tables[number]
        columns = dict(table.state) if with_state else {}
        widths = [column.shape[1] for column in columns.values()]
        said = {"step": table.step, "columns": list(columns), "widths": widths}
        return said, [bytes(numbers_of(each)) for each in (table.weight, *columns.values())]

    def _group(self, one: PlacedTable, groups: Groups) -> dict[str, Any]:
        """The settings of the step; what no message can carry is as the task made it."""
        return {**self._first[one.group], **groups[one.group]}


def answer_rows(found: Tensor) -> list[Buffer]:
    """The body of an answer with these rows."""
    return [numbers_of(found)] if found.numel() else []
