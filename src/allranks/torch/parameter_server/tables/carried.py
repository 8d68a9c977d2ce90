"""Tables between the scheduler, which has them whole for checkpoints, and the servers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.tables.placed import PlacedTable, numbers_of, rows_in
from allranks.torch.parameter_server.tables.row_table import state_in_torch


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
