"""The tables of a task on the servers of a job, and the operations of one server on its rows.

All processes compute the same list of tables from the same model. A table has a number, its index
in the list, and a position, that of its parameter in the optimizer. In a message:

    | ids: int64, increasing | rows, or their gradient: (n, dim), contiguous |

A worker sends the touched rows of all tables, then its dense gradient. The rows count if and only
if the dense gradient does, so a part that arrives twice counts once in tables too. The caller of
`ServedTables` must hold the lock of the server.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.launcher.messages import Buffer
from allranks.launcher.nodes.channel import Message
from allranks.torch.parameter_server.pulled_tables import Lookups, find_tables
from allranks.torch.parameter_server.row_table import (
    RowTable,
    TablePlan,
    rule_name,
    settings_of,
)
from allranks.torch.step.gradients import Gradients, clip_factor

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

    A frozen table stays whole in every process. Raises `RequestError` for a table or an optimizer
    which servers cannot update row by row.
    """
    plans, weights = find_tables(model), dict(model.named_parameters())
    for name in plans:
        if name not in names and weights[name].requires_grad:
            raise RequestError(
                asked=f"the table {name!r} on parameter servers",
                found="a parameter that requires a gradient but is not in the optimizer",
                why="servers update the rows of trained tables; frozen tables are in all processes",
                do="give it to the optimizer, or weight.requires_grad_(False)",
            )
    groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    return [
        PlacedTable(
            at,
            plans[name],
            rule_name(optimizer, weights[name], name),
            next(n for n, params in enumerate(groups) if id(weights[name]) in params),
        )
        for at, name in enumerate(names)
        if name in plans
    ]


def leave_rows(tables: Iterable[nn.Parameter], optimizer: Optimizer | None = None) -> None:
    """Drop the rows of trained tables, and their state, from this process: servers have them."""
    for table in tables:
        if table.requires_grad:
            table.data = table.data.new_empty(0, *table.shape[1:])
            if optimizer is not None:
                optimizer.state.pop(table, None)


def most_bytes(tables: Sequence[PlacedTable], servers: int) -> int:
    """The largest message about tables to or from one server: all its rows, and their state."""
    widest = max((4 * table.plan.bytes + ID_BYTES * table.plan.rows for table in tables), default=0)
    return widest // servers + (1 << 16)


def numbers_of(tensor: Tensor) -> Buffer:
    """The bytes of a tensor on the host, without a copy if it is contiguous."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def ids_in(body: memoryview, count: int) -> Tensor:
    """The ids of a message, in new memory."""
    return torch.frombuffer(body, dtype=torch.int64, count=count).clone()


def rows_in(body: memoryview, count: int, width: int, kind: torch.dtype, start: int = 0) -> Tensor:
    """(count, width) numbers from byte `start` of a body on, in new memory."""
    end = start + count * width * kind.itemsize
    if not count or not width:
        return torch.empty(count, width, dtype=kind)
    raw = torch.frombuffer(body[start:end], dtype=torch.uint8).clone()
    return raw.view(kind).view(count, width)


Groups = Sequence[Mapping[str, Any]]
PushedRows = list[tuple[int, Tensor, Tensor]]


class ServedTables:
    """The rows of all `tables` on server `index` of `servers`."""

    def __init__(
        self, tables: Sequence[PlacedTable], optimizer: Optimizer, index: int, servers: int
    ) -> None:
        self.placed = list(tables)
        self._first = [settings_of(group) for group in optimizer.param_groups]
        self.tables = [
            RowTable(table.plan, table.rule, index, servers, self._first[table.group])
            for table in tables
        ]
        self.most_bytes = most_bytes(tables, servers)
        """The largest message about rows on this server."""
        self._pushed: dict[int, PushedRows] = {}

    # --- workers --------------------------------------------------------------------------

    def pull(self, request: Message, body: memoryview) -> Tensor:
        """The rows that a worker requests: (count, dim)."""
        return self.tables[int(request["table"])].pull(ids_in(body, int(request["count"])))

    def hold(self, worker: int, header: Message, body: memoryview) -> None:
        """Keep the gradient of a worker's rows; they count with its next push."""
        number, count = int(header["table"]), int(header["count"])
        plan = self.tables[number].plan
        gradient = rows_in(body, count, plan.dim, plan.kind, count * ID_BYTES)
        self._pushed.setdefault(worker, []).append((number, ids_in(body, count), gradient))

    def drop(self, worker: int) -> None:
        """Drop the rows that a worker has sent since its last push."""
        self._pushed.pop(worker, None)

    def add_part(self, worker: int, part: int) -> None:
        """Synchronous mode: add the worker's rows as that part of the step."""
        for number, ids, gradient in self._pushed.pop(worker, ()):
            self.tables[number].add(ids, gradient, part)

    def push(self, worker: int, groups: Groups, slower: float, unused: Collection[int]) -> None:
        """Asynchronous mode: apply the worker's rows at once, at its rate divided by `slower`."""
        pushed = {number: (ids, gradient) for number, ids, gradient in self._pushed.pop(worker, ())}
        for number, (placed, table) in enumerate(zip(self.placed, self.tables, strict=True)):
            if placed.position in unused:
                continue
            group = self._group(placed, groups)
            group["lr"] = group["lr"] / slower
            if number in pushed:
                table.add(*pushed[number], part=0)
            table.apply(group)

    # --- the scheduler --------------------------------------------------------------------

    def squares(self, unused: Collection[int]) -> float:
        """The sum of the squares of the gradients of all rows here."""
        there = zip(self.placed, self.tables, strict=True)
        return sum(table.squares() for placed, table in there if placed.position not in unused)

    def scale(self, factor: float) -> None:
        """Multiply the gradient of the step by `factor`."""
        for table in self.tables:
            table.scale(factor)

    def apply(self, factor: float, groups: Groups, unused: Collection[int]) -> None:
        """Update the rows that a part of the step has touched, and end the step.

        A table `unused` by all samples of a step does not count that step.
        """
        for placed, table in zip(self.placed, self.tables, strict=True):
            if placed.position not in unused:
                table.apply(self._group(placed, groups), factor)
        self.forget()

    def forget(self) -> None:
        """End the step; without `apply` nothing changes."""
        for table in self.tables:
            table.forget()

    def load(self, header: Message, body: memoryview) -> None:
        """Start over with these rows, and their state if there is one."""
        placed, table = self.placed[int(header["table"])], self.tables[int(header["table"])]
        plan, ids, at = table.plan, table.ids(), 0
        table.forget()
        self._pushed.clear()
        table.state = table.rule.state_for(len(ids), plan.dim, plan.kind, self._first[placed.group])
        widths = {"": plan.dim, **{name: table.state[name].shape[1] for name in header["columns"]}}
        columns = {}
        for name, width in widths.items():
            columns[name] = rows_in(body, len(ids), width, plan.kind, at)
            at += columns[name].nbytes
        table.put(ids, columns.pop(""), columns)
        table.step = int(header["step"])

    def fetch(self, number: int, *, with_state: bool) -> tuple[Message, list[Buffer]]:
        """All rows of a table on this server, and their state, in the format of `load`."""
        table = self.tables[number]
        columns = dict(table.state) if with_state else {}
        widths = [column.shape[1] for column in columns.values()]
        header = {"step": table.step, "columns": list(columns), "widths": widths}
        return header, [bytes(numbers_of(each)) for each in (table.weight, *columns.values())]

    def _group(self, placed: PlacedTable, groups: Groups) -> dict[str, Any]:
        """The settings of the step; those which no message can carry are the task's."""
        return {**self._first[placed.group], **groups[placed.group]}


TableGradients = dict[str, tuple[Tensor, Tensor]]
"""For each table (ids, gradient)."""


class RowGradients(Gradients):
    """A gradient of this process alone; that of tables is in `of_tables`."""

    def __init__(
        self, parameters: list[nn.Parameter], tables: Sequence[PlacedTable], lookups: Lookups
    ) -> None:
        super().__init__(parameters)
        self.of_tables: TableGradients = lookups.gradients()
        self._tables = {table.position for table in tables}

    def settle(self, unused: Sequence[int]) -> None:
        super().settle(sorted({*unused, *self._tables}))

    def scale_(self, factor: float | Tensor) -> None:
        super().scale_(factor)
        for _, gradient in self.of_tables.values():
            gradient.mul_(factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        rows = [float(gradient.norm()) for _, gradient in self.of_tables.values()]
        return math.hypot(super().norm(clips=clips, left_out=left_out), *rows)

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        if not self.of_tables:
            return super().norm_unread(clips=clips, left_out=left_out)
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        super().clip_(limit, norm)
        factor = clip_factor(limit, norm)
        for _, gradient in self.of_tables.values():
            gradient.mul_(factor)


def check_no_rows(parameters: Sequence[nn.Parameter], positions: Collection[int]) -> None:
    """Raise `RequestError` where a regularizer has given one of these tables a gradient."""
    if any(parameters[at].grad is not None for at in positions):
        raise RequestError(
            asked="a regularizer of the task with --strategy ps",
            found="it reads a table that is on the servers",
            why="its gradient has every row, and servers update only the rows that samples touched",
            do="leave the table out of it, or --strategy ps:tables=whole",
        )
