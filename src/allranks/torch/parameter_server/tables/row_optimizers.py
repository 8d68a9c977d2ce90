"""How the rows of a table are updated that a step has touched, and none beside them.

Each rule is one of torch's optimizers, as it treats `nn.Embedding(sparse=True)`: the same numbers
from the same gradients, with its state for each row. A server holds some of the rows and knows of
an optimizer no more than its kind and the settings of a group. What would move rows that no sample
has touched (momentum, weight decay, the moments of a dense Adam) is refused: such a row would have
to be brought up to date when it is next read, and that is another algorithm.

    SGD              w ← w − γg
    Adagrad          s ← s + g²                        w ← w − γ' g / (√s + ε)    per number
    RowwiseAdagrad   s ← s + mean of g² over the row   w ← w − γ' g / (√s + ε)    per row
    SparseAdam       the moments of the touched rows, bias-corrected by the steps of the table

γ' = γ / (1 + (t − 1)·decay). Duchi et al. 2011; Kingma and Ba 2015; FBGEMM's EXACT_ROWWISE_ADAGRAD.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from allranks.errors import RequestError

Group = Mapping[str, Any]
State = dict[str, Tensor]


class RowRule(ABC):
    """One way to update rows. It holds nothing: state and settings are given to it."""

    moves_others: tuple[str, ...] = ("weight_decay",)
    """Settings under which rows that nobody touched would change."""

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
    """`torch.optim.Adagrad`: an accumulator for each number."""

    def state_for(self, rows: int, dim: int, kind: torch.dtype, group: Group) -> State:
        start = float(group["initial_accumulator_value"])
        return {"sum": torch.full((rows, self.width(dim)), start, dtype=kind)}

    def update(self, rows: Tensor, gradient: Tensor, state: State, step: int, group: Group) -> None:
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        state["sum"].add_(self.squares(gradient))
        divisor = state["sum"].sqrt().add_(group["eps"])
        rows.addcdiv_(_signed(gradient, group), divisor.expand_as(rows), value=-rate)

    def width(self, dim: int) -> int:
        """How many accumulators a row has."""
        return dim

    def squares(self, gradient: Tensor) -> Tensor:
        """What is added to the accumulators: (n, width)."""
        return gradient.square()


class RowwiseAdagradRule(AdagradRule):
    """`allranks.torch.optimizers.rowwise_adagrad`: an accumulator for each row."""

    def width(self, dim: int) -> int:
        return 1

    def squares(self, gradient: Tensor) -> Tensor:
        return gradient.square().mean(1, keepdim=True)


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
    "RowwiseAdagrad": RowwiseAdagradRule(),
    "SparseAdam": SparseAdamRule(),
}
"""By the name of the optimizer's class; a server is told the name."""

OF = ("torch.optim.", "allranks.torch.optimizers.")


def rule_name(optimizer: Optimizer, parameter: Tensor, table: str) -> str:
    """The name in `RULES` for a table of a task, or `RequestError` where none does the same."""
    kind = type(optimizer)
    name = kind.__name__
    if name not in RULES or not kind.__module__.startswith(OF):
        raise _refused(
            table,
            f"{kind.__qualname__}, which has no rule for rows",
            "rows of it would change, or count, that no sample has touched",
        )
    group = next(
        (g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None
    )
    if group is not None:
        check_group(name, group, table)
    return name


def check_group(name: str, group: Group, table: str) -> None:
    """Raise `RequestError` for settings under which rows move that nobody touched."""
    for setting in RULES[name].moves_others:
        if group.get(setting, 0) != 0:
            raise _refused(
                table,
                f"{name} with {setting}={group[setting]}",
                "it moves every row in every step, and a server updates those that were touched",
            )


def settings_of(group: Group) -> dict[str, Any]:
    """The settings of a group as plain numbers, which a message can carry."""
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
        "or --strategy ps:tables=whole, where it is as any other weight",
    )
