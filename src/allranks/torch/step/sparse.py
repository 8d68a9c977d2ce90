"""Sparse gradients (`nn.Embedding(sparse=True)`): the same on one rank and on many.

Gradients are summed dense, and the optimizers of torch take them so: for SGD and Adagrad that is
the same update. `SparseAdam`, and an optimizer of the task's own that may look at `is_sparse`, are
given what a plain loop gives them: the rows that some sample of the global batch touched. Which
rows these are rides on the tally, a number for each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from allranks.errors import RequestError
from allranks.torch.model.reals import reals


def wanting_rows(
    model: nn.Module, optimizer: Optimizer, parameters: list[nn.Parameter]
) -> set[int]:
    """The ids of the parameters whose gradient the optimizer is to have as rows."""
    if isinstance(optimizer, SparseAdam):
        return {id(parameter) for parameter in parameters}
    if type(optimizer).__module__.startswith("torch.optim"):
        return set()
    return {id(weight) for weight in tables_of(model)}


def tables_of(model: nn.Module) -> list[Tensor]:
    """The weights whose gradients come as rows."""
    tables = [m for m in model.modules() if getattr(m, "sparse", False) is True]
    weights = [table._parameters.get("weight") for table in tables]
    return [weight for weight in weights if weight is not None]


def one_number_a_row(gradient: Tensor) -> Tensor:
    """A hook that adds up a row which several samples touch, before the pass is added."""
    return gradient.coalesce() if gradient.is_sparse else gradient


class SparseRows:
    """Which rows of the parameters of `optimizer` a step touches. `is_apart` says not to look;
    the rows of those that are `served`, by their ids, lie elsewhere, and are counted there. With
    `exact` each pass adds one number to a row, as where its gradient is dense: a row that several
    samples touch is added up first."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        is_apart: Callable[[], bool],
        served: frozenset[int] = frozenset(),
        exact: bool = False,
    ) -> None:
        wanting = wanting_rows(model, optimizer, parameters) - served
        self.positions = [i for i, p in enumerate(parameters) if id(p) in wanting]
        self.parameters = [parameters[i] for i in self.positions]
        self.counts = [parameter.shape[0] for parameter in self.parameters]
        self.touched = [reals(p.detach()).new_zeros(p.shape[0]) for p in self.parameters]
        self._kind = type(optimizer).__name__
        self._is_apart = is_apart
        self.hooks = [
            parameter.register_hook(self.marker(number))
            for number, parameter in enumerate(self.parameters)
        ]
        if exact:
            trained = {id(parameter) for parameter in parameters}
            tables = {id(w): w for w in tables_of(model) if id(w) in trained}
            self.hooks += [table.register_hook(one_number_a_row) for table in tables.values()]

    def marker(self, number: int) -> Callable[[Tensor], None]:
        """A hook that notes the rows of a gradient of parameter `number` of these."""

        def mark(gradient: Tensor) -> None:
            if self._is_apart():
                return
            if not gradient.is_sparse:
                raise _not_sparse(self._kind, self.parameters[number])
            rows = self.touched[number]
            rows.index_fill_(0, gradient._indices()[0].to(rows.device), 1)

        return mark

    def forget(self) -> None:
        """No row has been touched."""
        for rows in self.touched:
            rows.zero_()

    def hand_over(self, touched: list[Tensor]) -> None:
        """Leave in `.grad` the touched rows alone; `touched` is summed over all ranks."""
        for parameter, marks in zip(self.parameters, touched, strict=True):
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            dense = parameter.grad
            rows = marks.nonzero().flatten().to(dense.device)
            if int(dense.count_nonzero()) != int(dense[rows].count_nonzero()):
                raise _not_sparse(self._kind, parameter)
            parameter.grad = torch.sparse_coo_tensor(
                rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False
            )


def _not_sparse(optimizer: str, parameter: Tensor) -> RequestError:
    return RequestError(
        asked=f"{optimizer} for a parameter of shape {tuple(parameter.shape)}",
        found="a gradient that is not of some rows alone",
        why="it is updated row by row, where a sample has touched it",
        do="give it parameters of nn.Embedding(sparse=True) alone, used in no other way and in no "
        "regularizer; or take sparse=True away and use a dense optimizer",
    )
