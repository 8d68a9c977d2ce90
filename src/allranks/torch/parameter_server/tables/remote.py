"""The rows on the servers, as a worker and the scheduler reach them.

A worker pulls and pushes rows, and has a gradient of which some is rows. The scheduler has the
tables whole, for checkpoints: it loads them into the servers, and takes them from there.
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

Found = dict[str, tuple[Tensor, Tensor]]
"""For each table (ids, gradient)."""


class RemoteRows:
    """Rows by message. `moved` counts bytes, as the dense weights are counted there."""

    def __init__(self, tables: Sequence[PlacedTable], moved: dict[str, Any]) -> None:
        self.tables = {one.plan.name: (number, one) for number, one in enumerate(tables)}
        self.moved = moved
        self.links: Links | None = None
        self.era = -1

    def link(self, links: Links, era: int) -> None:
        """Go on with these servers."""
        self.links, self.era = links, era

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """Ask every server that has some of the rows, then wait for all."""
        links = self.links
        assert links is not None
        number, one = self.tables[table]
        found = torch.empty(len(ids), one.plan.dim, dtype=one.plan.kind)
        parts = split(ids, len(links.servers))
        for server, at in enumerate(parts):
            if len(at):
                asked = {"table": number, "count": len(at)}
                links.send(server, {"rows": asked, "era": self.era}, *body_of(ids[at], ids[:0]))
        for server, at in enumerate(parts):
            if len(at):
                answer, body = links.receive(server)
                if "stale" in answer:
                    raise Stale(f"server {server} has been loaded anew")
                found[at] = rows_in(body, len(at), one.plan.dim, one.plan.kind)
                self.moved["pulled"][server] += len(body)
        return found

    def push(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        """Every server is told of its rows; they count with the push that follows."""
        links = self.links
        assert links is not None
        number, _ = self.tables[table]
        for server, at in enumerate(split(ids, len(links.servers))):
            if len(at):
                brought = {"table": number, "count": len(at)}
                body = body_of(ids[at], gradient[at])
                links.send(server, {"hold": brought, "era": self.era}, *body)
                self.moved["pushed"] += sum(map(len, body))

    def absent(self, found: Mapping[str, Any]) -> list[int]:
        """The positions of the tables of which nothing was `found`."""
        return [one.position for name, (_, one) in self.tables.items() if name not in found]


class RowGradients(Gradients):
    """A gradient of this process alone, of which that of tables is in `found`, rows by table."""

    def __init__(self, parameters: list[nn.Parameter], rows: RemoteRows, lookups: Lookups) -> None:
        super().__init__(parameters)
        self.found: Found = lookups.gradients()
        self._tables = {one.position for _, one in rows.tables.values()}

    def settle(self, unused: Sequence[int]) -> None:
        super().settle(sorted({*unused, *self._tables}))

    def scale_(self, factor: float | Tensor) -> None:
        super().scale_(factor)
        for _, gradient in self.found.values():
            gradient.mul_(factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        dense = super().norm(clips=clips, left_out=left_out)
        if not self.found:
            return dense
        return math.hypot(dense, *(float(gradient.norm()) for _, gradient in self.found.values()))

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        if not self.found:
            return super().norm_unread(clips=clips, left_out=left_out)
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        super().clip_(limit, norm)
        factor = clip_factor(limit, norm)
        for _, gradient in self.found.values():
            gradient.mul_(factor)


def load_tables(
    tables: Sequence[PlacedTable],
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    links: Links,
) -> None:
    """Let every server have its rows of these tables, and what the optimizer keeps for them."""
    servers = len(links.servers)
    for number, one in enumerate(tables):
        weight = parameters[one.position]
        kept = optimizer.state.get(weight, {})
        columns = {n: v for n, v in kept.items() if isinstance(v, Tensor) and v.ndim > 1}
        said = {"do": "load_rows", "table": number, "columns": list(columns)}
        said["step"] = int(kept.get("step", 0))
        for server in range(servers):
            held = (weight, *columns.values())
            body = [numbers_of(each[server::servers]) for each in held]
            links.send(server, said, *body)
            links.receive(server)


@torch.no_grad()
def take_tables(
    tables: Sequence[PlacedTable],
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer | None,
    links: Links,
) -> None:
    """The tables are those of the servers from here on, and so is what `optimizer` keeps of them.

    With no `optimizer` the rows alone come.
    """
    servers = len(links.servers)
    for number, one in enumerate(tables):
        weight, plan = parameters[one.position], one.plan
        columns: dict[str, Tensor] = {}
        step = 0
        for server in range(servers):
            asked = {"do": "fetch_rows", "table": number, "state": optimizer is not None}
            links.send(server, asked)
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
        if optimizer is not None and (state := state_in_torch(one.rule, step, columns)) and step:
            optimizer.state[weight].update(state)


def check_no_rows(parameters: Sequence[nn.Parameter], positions: Collection[int]) -> None:
    """Raise `RequestError` where a regularizer has given one of these tables a gradient."""
    if any(parameters[at].grad is not None for at in positions):
        raise RequestError(
            asked="a regularizer of the task with --strategy ps",
            found="it reads a table that lies on servers",
            why="its gradient is of every row, and servers update those that samples touched",
            do="leave the table out of it, or --strategy ps:tables=whole",
        )
