"""Access to the rows on the servers, for a worker and the scheduler.

A worker pulls and pushes rows, and its gradient consists of dense tensors and rows. The scheduler
has whole tables, for checkpoints: it loads them into the servers, and fetches them back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.parameter_server.links import Links, Stale
from allranks.torch.parameter_server.tables.pulled import Lookups
from allranks.torch.parameter_server.tables.row_table import split, state_in_torch
from allranks.torch.parameter_server.tables.served import PlacedTable, body_of, numbers_of, rows_in
from allranks.torch.step.gradients import Gradients, clip_factor

TableGradients = dict[str, tuple[Tensor, Tensor]]
"""For each table (ids, gradient)."""


class RemoteRows:
    """Rows by message. Adds to the byte counts in `moved`, which it shares with dense weights."""

    def __init__(self, tables: Sequence[PlacedTable], moved: dict[str, Any]) -> None:
        self.tables = {table.plan.name: (number, table) for number, table in enumerate(tables)}
        self.moved = moved
        self.links: Links | None = None
        self.era = -1

    def link(self, links: Links, era: int) -> None:
        """Use these servers."""
        self.links, self.era = links, era

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """Send requests to all servers that have some of the rows, then wait for all."""
        links = self.links
        assert links is not None
        number, placed = self.tables[table]
        rows = torch.empty(len(ids), placed.plan.dim, dtype=placed.plan.kind)
        parts = split(ids, len(links.servers))
        for server, at in enumerate(parts):
            if len(at):
                request = {"table": number, "count": len(at)}
                links.send(server, {"rows": request, "era": self.era}, *body_of(ids[at], ids[:0]))
        for server, at in enumerate(parts):
            if len(at):
                answer, body = links.receive(server)
                if "stale" in answer:
                    raise Stale(f"server {server} has been loaded anew")
                rows[at] = rows_in(body, len(at), placed.plan.dim, placed.plan.kind)
                self.moved["pulled"][server] += len(body)
        return rows

    def push(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        """Send each server its rows; they count with the dense push that follows."""
        links = self.links
        assert links is not None
        number, _ = self.tables[table]
        for server, at in enumerate(split(ids, len(links.servers))):
            if len(at):
                header = {"table": number, "count": len(at)}
                body = body_of(ids[at], gradient[at])
                links.send(server, {"hold": header, "era": self.era}, *body)
                self.moved["pushed"] += sum(map(len, body))

    def absent(self, touched: Mapping[str, Any]) -> list[int]:
        """The positions of the tables without `touched` rows."""
        return [table.position for name, (_, table) in self.tables.items() if name not in touched]


class RowGradients(Gradients):
    """A gradient of this process alone; that of tables is in `of_tables`."""

    def __init__(self, parameters: list[nn.Parameter], rows: RemoteRows, lookups: Lookups) -> None:
        super().__init__(parameters)
        self.of_tables: TableGradients = lookups.gradients()
        self._tables = {table.position for _, table in rows.tables.values()}

    def settle(self, unused: Sequence[int]) -> None:
        super().settle(sorted({*unused, *self._tables}))

    def scale_(self, factor: float | Tensor) -> None:
        super().scale_(factor)
        for _, gradient in self.of_tables.values():
            gradient.mul_(factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        dense = super().norm(clips=clips, left_out=left_out)
        if not self.of_tables:
            return dense
        return math.hypot(
            dense, *(float(gradient.norm()) for _, gradient in self.of_tables.values())
        )

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        if not self.of_tables:
            return super().norm_unread(clips=clips, left_out=left_out)
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        super().clip_(limit, norm)
        factor = clip_factor(limit, norm)
        for _, gradient in self.of_tables.values():
            gradient.mul_(factor)


def load_tables(
    tables: Sequence[PlacedTable],
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    links: Links,
) -> None:
    """Send each server its rows of these tables, and their optimizer state."""
    servers = len(links.servers)
    for number, table in enumerate(tables):
        weight = parameters[table.position]
        state = optimizer.state.get(weight, {})
        columns = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.ndim > 1}
        header = {"do": "load_rows", "table": number, "columns": list(columns)}
        header["step"] = int(state.get("step", 0))
        for server in range(servers):
            tensors = (weight, *columns.values())
            body = [numbers_of(each[server::servers]) for each in tensors]
            links.send(server, header, *body)
            links.receive(server)


@torch.no_grad()
def take_tables(
    tables: Sequence[PlacedTable],
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer | None,
    links: Links,
) -> None:
    """Fetch the tables from the servers, and their optimizer state.

    Without `optimizer` only the rows.
    """
    servers = len(links.servers)
    for number, table in enumerate(tables):
        weight, plan = parameters[table.position], table.plan
        columns: dict[str, Tensor] = {}
        step = 0
        for server in range(servers):
            request = {"do": "fetch_rows", "table": number, "state": optimizer is not None}
            links.send(server, request)
            answer, body = links.receive(server)
            count, step = len(range(server, plan.rows, servers)), int(answer["step"])
            rows = rows_in(body, count, plan.dim, plan.kind)
            weight[server::servers] = rows.to(weight.device)
            at = rows.nbytes
            for name, width in zip(answer["columns"], answer["widths"], strict=True):
                column = rows_in(body, count, width, plan.kind, at)
                at += column.nbytes
                if name not in columns:
                    columns[name] = weight.new_empty(plan.rows, width)
                columns[name][server::servers] = column.to(weight.device)
        if optimizer is not None and (state := state_in_torch(table.rule, step, columns)) and step:
            optimizer.state[weight].update(state)


def check_no_rows(parameters: Sequence[nn.Parameter], positions: Collection[int]) -> None:
    """Raise `RequestError` where a regularizer has given one of these tables a gradient."""
    if any(parameters[at].grad is not None for at in positions):
        raise RequestError(
            asked="a regularizer of the task with --strategy ps",
            found="it reads a table that is on the servers",
            why="its gradient has every row, and servers update only the rows that samples touched",
            do="leave the table out of it, or --strategy ps:tables=whole",
        )
