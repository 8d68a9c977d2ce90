"""The rows of a table that a step touched: counted, handed over alone, and nothing beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from allranks.errors import RequestError
from allranks.torch.step.gradients import SparseRows, wanting_rows


class Own(Optimizer):
    """An optimizer that torch does not know, which may ask whether a gradient is sparse."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def made(*, is_apart: bool = False) -> tuple[nn.Embedding, SparseRows]:
    table = nn.Embedding(6, 2, sparse=True)
    rows = SparseRows(table, SparseAdam([table.weight]), [table.weight], lambda: is_apart)
    return table, rows


def touch(table: nn.Embedding, *rows: int) -> None:
    table(torch.tensor(rows)).sum().backward()


def test_touched_rows_are_counted_until_they_are_forgotten() -> None:
    table, rows = made()
    touch(table, 1, 4, 4)
    touch(table, 0)
    assert rows.touched[0].tolist() == [1, 1, 0, 0, 1, 0]
    rows.forget()
    assert rows.touched[0].tolist() == [0] * 6
    table, rows = made(is_apart=True)
    touch(table, 1)
    assert rows.touched[0].tolist() == [0] * 6, "a backward pass of the task's own is no step"


def test_the_optimizer_is_given_the_rows_that_any_rank_touched() -> None:
    """Row 4 was touched on another rank, and row 1 with a gradient of zero."""
    table, rows = made()
    table.weight.grad = torch.zeros(6, 2)
    table.weight.grad[4] = 3.0
    rows.hand_over([torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0, 0.0])])
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[1, 4]]
    assert gradient.coalesce().values().tolist() == [[0.0, 0.0], [3.0, 3.0]]


def test_a_gradient_beside_the_touched_rows_is_refused() -> None:
    """That of a regularizer over the whole table: its rows would be lost."""
    table, rows = made()
    table.weight.grad = torch.ones(6, 2)
    with pytest.raises(RequestError, match="not of some rows alone"):
        rows.hand_over([torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])])


def test_which_optimizers_are_given_rows() -> None:
    table, dense = nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2)
    model = nn.ModuleList([table, dense])
    parameters = [table.weight, dense.weight]
    for kind in (SGD, Adagrad):
        assert wanting_rows(model, kind(parameters, lr=0.1), parameters) == set()
    assert wanting_rows(model, Own(parameters), parameters) == {id(table.weight)}
    both = {id(parameter) for parameter in parameters}
    assert wanting_rows(model, SparseAdam(parameters), parameters) == both
