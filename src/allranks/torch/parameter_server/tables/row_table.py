"""The rows of one table that one server holds: r with r % servers == index.

A server calls this; it knows no wire. In the synchronous mode the parts of a step come in any
order, and twice where one was handed out again: the first counts, and they are summed in the order
of the parts, so the sum does not know who was first. Rows that no part touched are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.torch.parameter_server.tables.row_optimizers import RULES, Group, State


@dataclass(frozen=True)
class TablePlan:
    """A table as everybody knows it: the name of its parameter, (rows, dim), and its type."""

    name: str
    rows: int
    dim: int
    kind: torch.dtype

    @property
    def bytes(self) -> int:
        """Of its rows, without state."""
        return self.rows * self.dim * self.kind.itemsize


class RowTable:
    """The rows of a table on server `index` of `servers`, and the state of its optimizer.

    `rule` is a name of `RULES`, `group` has the settings of the optimizer's group (`settings_of`).
    `ids` are always numbers of rows of the whole table, int64, rising, each of them once, and rows
    of this server. Nothing here communicates.
    """

    def __init__(self, plan: TablePlan, rule: str, index: int, servers: int, group: Group) -> None:
        assert 0 <= index < servers
        self.plan, self.index, self.servers = plan, index, servers
        self.rule = RULES[rule]
        held = len(range(index, plan.rows, servers))
        self.weight = torch.zeros(held, plan.dim, dtype=plan.kind)
        self.state: State = self.rule.state_for(held, plan.dim, plan.kind, group)
        self.step = 0
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._sum: tuple[Tensor, Tensor] | None = None

    def ids(self) -> Tensor:
        """All rows that are here."""
        return torch.arange(self.index, self.plan.rows, self.servers)

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of the rows: (n, dim)."""
        return self.weight[self._places(ids)]

    # --- one step of all parts -----------------------------------------------------------

    def add(self, ids: Tensor, gradient: Tensor, part: int) -> bool:
        """Keep the gradient (n, dim) of one part of the step; `False` if that part was here."""
        assert gradient.shape == (len(ids), self.plan.dim) and gradient.dtype == self.plan.kind
        if part in self._parts:
            return False
        self._parts[part] = self._places(ids), gradient
        self._sum = None
        return True

    def summed(self) -> tuple[Tensor, Tensor]:
        """(ids, gradient) of the rows that some part touched, summed in the order of the parts."""
        places, gradient = self._summed()
        return places * self.servers + self.index, gradient

    def squares(self) -> float:
        """The sum of the squares of the summed gradient: this server's share of its norm."""
        return float(self._summed()[1].square().sum())

    def scale(self, factor: float) -> None:
        """What the parts give is `factor` times as much from here on."""
        places, gradient = self._summed()
        self._sum = places, gradient * factor

    def apply(self, group: Group, factor: float = 1.0) -> int:
        """Update the touched rows by `factor` times the sum, and forget it. Returns how many."""
        places, gradient = self._summed()
        self.step += 1
        if len(places):
            rows = self.weight[places]
            state = {name: column[places] for name, column in self.state.items()}
            given = gradient if factor == 1.0 else gradient * factor
            self.rule.update(rows, given, state, self.step, group)
            self.weight[places] = rows
            for name, column in state.items():
                self.state[name][places] = column
        self.forget()
        return len(places)

    def forget(self) -> None:
        """Let go of what the parts have brought: the step is not made."""
        self._parts.clear()
        self._sum = None

    def push(self, ids: Tensor, gradient: Tensor, group: Group, factor: float = 1.0) -> int:
        """A step of one worker, made at once (asynchronous modes)."""
        assert not self._parts, "a step of parts is in progress"
        self.add(ids, gradient, 0)
        return self.apply(group, factor)

    # --- what a checkpoint holds ---------------------------------------------------------

    def put(self, ids: Tensor, rows: Tensor, state: Mapping[str, Tensor] | None = None) -> None:
        """Write rows (n, dim), and their state (n, dim or 1) where it is given."""
        places = self._places(ids)
        self.weight[places] = rows.to(self.plan.kind)
        for name, column in (state or {}).items():
            self.state[name][places] = column.to(self.plan.kind)

    def state_of(self, ids: Tensor) -> State:
        """Copies of the state of these rows: (n, dim) or (n, 1) by name."""
        places = self._places(ids)
        return {name: column[places] for name, column in self.state.items()}

    def _summed(self) -> tuple[Tensor, Tensor]:
        if self._sum is None:
            parts = [self._parts[part] for part in sorted(self._parts)]
            self._sum = _sum_in_order(parts, self.weight)
        return self._sum

    def _places(self, ids: Tensor) -> Tensor:
        """Where the rows are in `weight`."""
        assert ids.dtype == torch.int64 and ids.ndim == 1
        if len(ids):
            assert bool((ids % self.servers == self.index).all()), "rows of another server"
            assert bool((ids[1:] > ids[:-1]).all()), "rows that do not rise"
            assert int(ids[0]) >= 0 and int(ids[-1]) < self.plan.rows, "rows that do not exist"
        return ids.div(self.servers, rounding_mode="floor")


def _sum_in_order(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    """(places, gradient) of the rows of all parts, each added to those before it."""
    if not parts:
        return torch.empty(0, dtype=torch.int64), like.new_empty(0, like.shape[1])
    if len(parts) == 1:
        return parts[0]
    places, at = torch.cat([rows for rows, _ in parts]).unique(return_inverse=True)
    total = like.new_zeros(len(places), like.shape[1])
    for (_, gradient), where in zip(parts, at.split([len(rows) for rows, _ in parts]), strict=True):
        total.index_add_(0, where, gradient)
    return places, total


def split(ids: Tensor, servers: int) -> list[Tensor]:
    """For each server the positions in `ids` of the rows that it holds, in order."""
    if servers == 1:
        return [torch.arange(len(ids))]
    owners = ids % servers
    return [(owners == server).nonzero().flatten() for server in range(servers)]


def state_in_torch(rule: str, step: int, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a whole table as torch's optimizer has it, from `columns` of all its rows."""
    counted = RULES[rule].step_in_torch(step)
    return dict(columns) if counted is None else {"step": counted, **columns}
