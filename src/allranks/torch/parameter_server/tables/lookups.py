"""What the tables of a worker have been asked for since its last push.

Each lookup has a leaf of autograd with the rows that it touched, one of each. A row travels once
between two pushes: a second lookup, of that table or in another micro-batch, takes it from here.
After the backward passes the gradients of all lookups of a table add up, in the order in which they
were made, and only these rows are pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from allranks.torch.parameter_server.tables.row_table import TablePlan


class Rows(Protocol):
    """The servers, as a worker sees them. `ids`: (n,) int64 on the host, rising, each once."""

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """The rows as they are now: (n, dim), on the host."""
        ...

    def push(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        """A gradient (n, dim) for them, on the host."""
        ...


@dataclass(frozen=True)
class Looked:
    """One lookup: rows `ids` as a leaf. The one at place `padding` is touched by nobody."""

    ids: Tensor
    leaf: Tensor
    padding: int | None

    def gradient(self) -> tuple[Tensor, Tensor] | None:
        """(ids, gradient) of the rows that were touched; `None` before backward."""
        if self.leaf.grad is None:
            return None
        ids, gradient = self.ids, self.leaf.grad.cpu()
        if self.padding is None:
            return ids, gradient
        others = torch.arange(len(ids)) != self.padding
        return ids[others], gradient[others]


class Lookups:
    """The rows that a worker has, and the lookups whose gradients it owes.

    `used` is called with the name of a table when backward has reached a lookup of it.
    """

    def __init__(self, rows: Rows, used: Callable[[str], None] = lambda table: None) -> None:
        self.rows, self._used = rows, used
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        self._looked: dict[str, list[Looked]] = {}

    def rows_of(self, plan: TablePlan, ids: Tensor) -> Tensor:
        """The rows (n, dim), where `ids` are; pulls those that are not here yet."""
        return self._values(plan, ids.cpu()).to(ids.device)

    def leaf(self, plan: TablePlan, ids: Tensor, padding: int | None) -> Tensor:
        """The same as a leaf whose gradient is owed to the servers, without that at `padding`."""
        leaf = self.rows_of(plan, ids)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(lambda _: self._used(plan.name))
            self._looked.setdefault(plan.name, []).append(Looked(ids.cpu(), leaf, padding))
        return leaf

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each table (ids, gradient) of the rows that backward has reached; lets go of all."""
        found = {}
        for table, lookups in self._looked.items():
            given = [each for looked in lookups if (each := looked.gradient()) is not None]
            if given:
                found[table] = _added(given)
        self.forget()
        return found

    def push(self) -> None:
        """Hand the gradients to the servers, and let go of the rows: the next step has others."""
        for table, (ids, gradient) in self.gradients().items():
            self.rows.push(table, ids, gradient)

    def forget(self) -> None:
        """Nothing has been looked up: what is here may be out of date."""
        self._held.clear()
        self._looked.clear()

    def _values(self, plan: TablePlan, ids: Tensor) -> Tensor:
        """A copy of the rows that nobody else holds."""
        none = torch.empty(0, dtype=torch.int64), torch.empty(0, plan.dim, dtype=plan.kind)
        known, values = self._held.get(plan.name, none)
        missing = ids[~torch.isin(ids, known, assume_unique=True)]
        if len(missing):
            pulled = self.rows.pull(plan.name, missing)
            if not len(known):
                known, values = missing, pulled
            else:
                known, order = torch.cat([known, missing]).sort()
                values = torch.cat([values, pulled])[order]
            self._held[plan.name] = known, values
        return values[torch.searchsorted(known, ids)]


def _added(given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(given) == 1:
        return given[0]
    counts = [len(ids) for ids, _ in given]
    ids, at = torch.cat([ids for ids, _ in given]).unique(return_inverse=True)
    total = given[0][1].new_zeros(len(ids), given[0][1].shape[1])
    for (_, gradient), where in zip(given, at.split(counts), strict=True):
        total.index_add_(0, where, gradient)
    return ids, total
