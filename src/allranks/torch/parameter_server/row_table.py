"""The rows of one table on one server, and the rules that update the rows of a step.

A server has the rows r with r % servers == index. Nothing here communicates. In synchronous mode
the parts of a step arrive in any order, and twice if one was handed out again. The first one
counts, and the sum is in the order of the parts, so it does not depend on the order of arrival.
Rows that no part touched are not read.

Each rule is one of torch's optimizers on `nn.Embedding(sparse=True)`: the same results for the same
gradients, with state for each row. A server knows only the kind of an optimizer and the settings of
a group. Settings that move untouched rows (momentum, weight decay, the moments of a dense Adam) are
refused: such rows would need an update when they are next read, which is another algorithm.

    SGD              w ← w − γg
    Adagrad          s ← s + g²                        w ← w − γ' g / (√s + ε)    per number
    RowwiseAdagrad   s ← s + mean of g² over the row   w ← w − γ' g / (√s + ε)    per row
    SparseAdam       the moments of the touched rows, bias-corrected by the steps of the table

γ' = γ / (1 + (t − 1)·decay). Duchi et al. 2011; Kingma and Ba 2015; FBGEMM's EXACT_ROWWISE_ADAGRAD.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from allranks.errors import RequestError

Group = Mapping[str, Any]
State = dict[str, Tensor]


class RowRule(ABC):
    """One way to update rows. It is stateless: state and settings are arguments."""

    moves_others: tuple[str, ...] = ("weight_decay",)
    """Settings under which untouched rows would change."""

    @abstractmethod
    def state_for(self, rows: int, dim: int, kind: torch.dtype, group: Group) -> State:
        """The state of `rows` rows before the first step: tensors (rows, dim) or (rows, 1)."""

    @abstractmethod
    def update(self, rows: Tensor, gradient: Tensor, state: State, step: int, group: Group) -> None:
        """Update `rows` (n, dim) and their `state` in place, by `gradient` (n, dim).

        `step` counts the steps of the table from 1, also those that touched no row of it.
        """

    def step_in_torch(self, step: int) -> Any:
        """The count of steps as torch's optimizer keeps it in its state; `None`: it keeps none."""
        return torch.tensor(float(step))


class SGDRule(RowRule):
    """`torch.optim.SGD` without momentum."""

    moves_others = ("weight_decay", "momentum")

    def state_for(self, rows: int, dim: int, kind: torch.dtype, group: Group) -> State:
        return {}

    def update(self, rows: Tensor, gradient: Tensor, state: State, step: int, group: Group) -> None:
        rows.add_(_signed(gradient, group), alpha=-float(group["lr"]))

    def step_in_torch(self, step: int) -> Any:
        return None


class AdagradRule(RowRule):
    """`torch.optim.Adagrad`: an accumulator for each number.

    With `by_row`, `allranks.torch.optimizers.rowwise_adagrad`: an accumulator for each row.
    """

    def __init__(self, *, by_row: bool = False) -> None:
        self.by_row = by_row

    def state_for(self, rows: int, dim: int, kind: torch.dtype, group: Group) -> State:
        start = float(group["initial_accumulator_value"])
        width = 1 if self.by_row else dim
        return {"sum": torch.full((rows, width), start, dtype=kind)}

    def update(self, rows: Tensor, gradient: Tensor, state: State, step: int, group: Group) -> None:
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        squares = gradient.square()
        state["sum"].add_(squares.mean(1, keepdim=True) if self.by_row else squares)
        divisor = state["sum"].sqrt().add_(group["eps"])
        rows.addcdiv_(_signed(gradient, group), divisor.expand_as(rows), value=-rate)


class SparseAdamRule(RowRule):
    """`torch.optim.SparseAdam`: rows keep their moments until they are touched again."""

    def state_for(self, rows: int, dim: int, kind: torch.dtype, group: Group) -> State:
        return {name: torch.zeros(rows, dim, dtype=kind) for name in ("exp_avg", "exp_avg_sq")}

    def update(self, rows: Tensor, gradient: Tensor, state: State, step: int, group: Group) -> None:
        first, second = group["betas"]
        gradient = _signed(gradient, group)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.add_(gradient - mean, alpha=1 - first)
        square.add_(gradient.square() - square, alpha=1 - second)
        rate = float(group["lr"]) * math.sqrt(1 - second**step) / (1 - first**step)
        rows.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate)

    def step_in_torch(self, step: int) -> Any:
        return step


RULES: dict[str, RowRule] = {
    "SGD": SGDRule(),
    "Adagrad": AdagradRule(),
    "RowwiseAdagrad": AdagradRule(by_row=True),
    "SparseAdam": SparseAdamRule(),
}
"""By the name of the optimizer's class, which is sent to servers."""

OF = ("torch.optim.", "allranks.torch.optimizers.")


def rule_name(optimizer: Optimizer, parameter: Tensor, table: str) -> str:
    """The name in `RULES` for a table; raises `RequestError` if no rule fits the optimizer."""
    kind = type(optimizer)
    name = kind.__name__
    if name not in RULES or not kind.__module__.startswith(OF):
        raise _refused(
            table,
            f"{kind.__qualname__}, which has no rule for rows",
            "it would change rows, or their counts, that no sample has touched",
        )
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            check_group(name, group, table)
    return name


def check_group(name: str, group: Group, table: str) -> None:
    """Raise `RequestError` for settings under which untouched rows change."""
    for setting in RULES[name].moves_others:
        if group.get(setting, 0) != 0:
            raise _refused(
                table,
                f"{name} with {setting}={group[setting]}",
                "it changes every row in every step, and a server updates only the touched ones",
            )


def settings_of(group: Group) -> dict[str, Any]:
    """The settings of a group as plain values, which a message can carry."""
    return {
        name: float(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params" and isinstance(value, (Tensor, bool, int, float, str, tuple, list))
    }


def _signed(gradient: Tensor, group: Group) -> Tensor:
    return -gradient if group.get("maximize", False) else gradient


def _refused(table: str, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"the table {table!r} on parameter servers",
        found=found,
        why=why,
        do="give it SGD without momentum and weight decay, Adagrad, RowwiseAdagrad or SparseAdam; "
        "or --strategy ps:tables=whole, which treats it like any other weight",
    )


@dataclass(frozen=True)
class TablePlan:
    """A table in all processes: the name of its parameter, (rows, dim), and its dtype."""

    name: str
    rows: int
    dim: int
    kind: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of its rows, without state."""
        return self.rows * self.dim * self.kind.itemsize


class RowTable:
    """The rows of a table on server `index` of `servers`, and the state of its optimizer.

    `rule` is a name of `RULES`, `group` has the settings of the optimizer's group (`settings_of`).
    `ids` are always row numbers of the whole table, int64, strictly increasing, all on this server.
    Nothing here communicates.
    """

    def __init__(self, plan: TablePlan, rule: str, index: int, servers: int, group: Group) -> None:
        assert 0 <= index < servers
        self.plan, self.index, self.servers = plan, index, servers
        self.rule = RULES[rule]
        rows = len(range(index, plan.rows, servers))
        self.weight = torch.zeros(rows, plan.dim, dtype=plan.kind)
        self.state: State = self.rule.state_for(rows, plan.dim, plan.kind, group)
        self.step = 0
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._sum: tuple[Tensor, Tensor] | None = None

    def ids(self) -> Tensor:
        """The ids of all rows on this server."""
        return torch.arange(self.index, self.plan.rows, self.servers)

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of the rows: (n, dim)."""
        return self.weight[self._places(ids)]

    # --- one step of all parts -----------------------------------------------------------

    def add(self, ids: Tensor, gradient: Tensor, part: int) -> bool:
        """Keep the gradient (n, dim) of one part of the step; `False` if it was added before."""
        assert gradient.shape == (len(ids), self.plan.dim) and gradient.dtype == self.plan.kind
        if part in self._parts:
            return False
        self._parts[part] = self._places(ids), gradient
        self._sum = None
        return True

    def summed(self) -> tuple[Tensor, Tensor]:
        """(places, gradient) of all touched rows, summed in the order of the parts."""
        if self._sum is None:
            parts = [self._parts[part] for part in sorted(self._parts)]
            none = torch.empty(0, dtype=torch.int64), self.weight[:0]
            self._sum = sum_rows(parts) if parts else none
        return self._sum

    def squares(self) -> float:
        """The sum of the squares of the summed gradient: this server's share of its norm."""
        return float(self.summed()[1].square().sum())

    def scale(self, factor: float) -> None:
        """Multiply the summed gradient by `factor`."""
        places, gradient = self.summed()
        self._sum = places, gradient * factor

    def apply(self, group: Group, factor: float = 1.0) -> int:
        """Update the touched rows by `factor` times the sum, and clear it. Returns how many."""
        places, gradient = self.summed()
        self.step += 1
        if len(places):
            rows = self.weight[places]
            state = {name: column[places] for name, column in self.state.items()}
            scaled = gradient if factor == 1.0 else gradient * factor
            self.rule.update(rows, scaled, state, self.step, group)
            self.weight[places] = rows
            for name, column in state.items():
                self.state[name][places] = column
        self.forget()
        return len(places)

    def forget(self) -> None:
        """Drop the gradients of all parts, without an update."""
        self._parts.clear()
        self._sum = None

    # --- what a checkpoint holds ---------------------------------------------------------

    def put(self, ids: Tensor, rows: Tensor, state: Mapping[str, Tensor] | None = None) -> None:
        """Write rows (n, dim), and their state (n, dim or 1) if there is one."""
        places = self._places(ids)
        self.weight[places] = rows.to(self.plan.kind)
        for name, column in (state or {}).items():
            self.state[name][places] = column.to(self.plan.kind)

    def _places(self, ids: Tensor) -> Tensor:
        """The indices of the rows in `weight`."""
        assert ids.dtype == torch.int64 and ids.ndim == 1
        if len(ids):
            assert bool((ids % self.servers == self.index).all()), "rows of another server"
            assert bool((ids[1:] > ids[:-1]).all()), "rows that do not rise"
            assert int(ids[0]) >= 0 and int(ids[-1]) < self.plan.rows, "rows that do not exist"
        return ids.div(self.servers, rounding_mode="floor")


def sum_rows(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(rows, gradient) of all parts, in one or more, each added to those before it."""
    if len(parts) == 1:
        return parts[0]
    rows, at = torch.cat([rows for rows, _ in parts]).unique(return_inverse=True)
    total = parts[0][1].new_zeros(len(rows), parts[0][1].shape[1])
    for (_, gradient), where in zip(parts, at.split([len(rows) for rows, _ in parts]), strict=True):
        total.index_add_(0, where, gradient)
    return rows, total


def split(ids: Tensor, servers: int) -> list[Tensor]:
    """For each server the positions in `ids` of its rows, in order."""
    if servers == 1:
        return [torch.arange(len(ids))]
    owners = ids % servers
    return [(owners == server).nonzero().flatten() for server in range(servers)]


def state_in_torch(rule: str, step: int, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a whole table in torch's format, from `columns` of all its rows."""
    counted = RULES[rule].step_in_torch(step)
    return dict(columns) if counted is None else {"step": counted, **columns}
