"""Row-wise Adagrad: Adagrad with one accumulator for each row of a table, not for each number.

    s_r ← s_r + mean of g² over row r
    w_r ← w_r − γ' g_r / (√s_r + ε)        γ' = γ / (1 + (t − 1)·decay)

It is what tables of recommendation models are trained with: the state of a table of 64 columns is a
sixty-fourth of Adagrad's. FBGEMM calls it EXACT_ROWWISE_ADAGRAD, torchrec RowWiseAdagrad; Duchi,
Hazan and Singer 2011 is the Adagrad. A row is what one index of the first dimension selects, so in
a vector each number is its own row. A row without gradient stays as it is, so a sparse gradient
and the same one with its zeros give the same update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from allranks.torch.optimizers.layerwise import check_settings


class RowwiseAdagrad(Optimizer):
    """Takes dense and sparse gradients. Its state is `sum`, (rows, 1, …), and `step`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        check_settings("RowwiseAdagrad", **numbers)
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "sum" not in state:
            start = group["initial_accumulator_value"]
            state["step"] = torch.tensor(0.0)
            state["sum"] = weight.new_full((*weight.shape[:1], *[1] * (weight.ndim - 1)), start)
        state["step"] += 1
        rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        total: Tensor = state["sum"]
        if not gradient.is_sparse:
            total += _mean_of_squares(gradient)
            weight.addcdiv_(
                gradient, total.sqrt().add_(group["eps"]).expand_as(weight), value=-rate
            )
            return
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        total[rows] += _mean_of_squares(values)
        divisor = total[rows].sqrt().add_(group["eps"])
        weight.index_add_(0, rows, values / divisor, alpha=-rate)


def _mean_of_squares(rows: Tensor) -> Tensor:
    squares = rows.square()
    return squares.mean(list(range(1, rows.ndim)), keepdim=True) if rows.ndim > 1 else squares
