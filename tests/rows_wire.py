"""The servers of tables in this process: a wire that is none, and counts what would travel."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.torch.parameter_server.pulled_tables import Lookups, find_tables
from allranks.torch.parameter_server.row_table import RowTable, rule_name, settings_of, split


class Wire:
    """Servers of this process, as a worker sees them; counts the rows that travel."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, servers: int) -> None:
        weights = dict(model.named_parameters())
        self.group = settings_of(optimizer.param_groups[0])
        self.tables: dict[str, list[RowTable]] = {}
        for name, plan in find_tables(model).items():
            rule = rule_name(optimizer, weights[name], name)
            self.tables[name] = [
                RowTable(plan, rule, index, servers, self.group) for index in range(servers)
            ]
            for table in self.tables[name]:
                table.put(table.ids(), weights[name].detach()[table.ids()])
        self.pulled: Counter[str] = Counter()
        self.pushed: Counter[str] = Counter()
        self.part = 0

    def pull(self, table: str, ids: Tensor) -> Tensor:
        self.pulled[table] += len(ids)
        servers = self.tables[table]
        found = servers[0].weight.new_empty(len(ids), servers[0].plan.dim)
        for server, at in zip(servers, split(ids, len(servers)), strict=True):
            found[at] = server.pull(ids[at])
        return found

    def push(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        self.pushed[table] += len(ids)
        servers = self.tables[table]
        for server, at in zip(servers, split(ids, len(servers)), strict=True):
            server.add(ids[at], gradient[at], self.part)

    def push_all(self, lookups: Lookups) -> None:
        """Push the gradients of a worker's lookups."""
        for table, (ids, gradient) in lookups.gradients().items():
            self.push(table, ids, gradient)

    def apply(self) -> None:
        for servers in self.tables.values():
            for server in servers:
                server.apply(self.group)

    def whole(self, table: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The rows of a table, and the columns of its state, gathered from all servers."""
        servers = self.tables[table]
        weight = servers[0].weight.new_empty(servers[0].plan.rows, servers[0].plan.dim)
        state = {n: weight.new_empty(len(weight), c.shape[1]) for n, c in servers[0].state.items()}
        for server in servers:
            weight[server.ids()] = server.weight
            for name, column in server.state.items():
                state[name][server.ids()] = column
        return weight, state
