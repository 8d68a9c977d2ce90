"""Tables on parameter servers, over a wire that is none: equal to torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from allranks.torch.optimizers.rowwise_adagrad import RowwiseAdagrad
from allranks.torch.parameter_server.pulled_tables import Lookups, pull_tables
from allranks.torch.parameter_server.row_table import (
    RowTable,
    TablePlan,
    settings_of,
    state_in_torch,
)
from rows_wire import Wire

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch itself

ROWS, DIM, WORKERS, STEPS = 37, 3, 3, 5
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda weights: SGD(weights, lr=0.01),
    "Adagrad": lambda weights: Adagrad(
        weights, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.01
    ),
    "RowwiseAdagrad": lambda weights: RowwiseAdagrad(
        weights, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.01
    ),
    "SparseAdam": lambda weights: SparseAdam(weights, lr=0.05),
}


class Model(nn.Module):
    """Every kind of lookup, and two layers that share a table, one of them with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, sparse=True)
        self.padded = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=2)
        self.padded.weight = self.words.weight
        self.sums = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.means = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True, padding_idx=5)
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, 4), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        flat, offsets = ids.reshape(-1), torch.arange(0, ids.numel(), ids.shape[1])
        found = self.words(ids).mean(1) + self.padded(ids + 1).sin().sum(1)
        found = found * self.sums(flat, offsets, self.weights.repeat(len(ids)))
        return found + self.means(ids).tanh()  # (n, DIM)


def drawn(step: int, part: int) -> Tensor:
    """The samples of one part of a step: (n, 4) rows, some often, most never."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(1, 12 + step, (part + 2, 4), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(ids)
    return (found - ids[:, :DIM]).square().sum()


def model_of(kind: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(4)
    return Model().to(kind)


def trained_on_servers(name: str, servers: int, *, in_order: bool = False) -> Wire:
    whole = model_of()
    wire = Wire(whole, OPTIMIZERS[name](tables_of(whole)), servers)
    workers = []
    for _ in range(WORKERS):
        model, lookups = model_of(), Lookups(wire.pull)
        pull_tables(model, lookups)
        assert not any(len(p) for p in tables_of(model)), "a worker has no row"
        workers.append((model, lookups))
    for step in range(STEPS):
        parts = torch.randperm(WORKERS, generator=torch.Generator().manual_seed(step)).tolist()
        for part in sorted(parts) if in_order else parts:
            (model, lookups), wire.part = workers[part], part
            for piece in drawn(step, part).split(2):  # micro-batches
                loss_of(model, piece).backward()
            wire.push_all(lookups)
        wire.apply()
    return wire


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name != "weights"]


@pytest.mark.slow(but=2, most=5)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_train_as_torch_does_in_one_process(name: str, servers: int) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](tables_of(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(WORKERS):
            loss_of(model, drawn(step, part)).backward()
        optimizer.step()
    wire = trained_on_servers(name, servers)
    parameters = dict(model.named_parameters())
    assert set(wire.tables) == {"words.weight", "sums.weight", "means.weight"}
    for table, found in wire.tables.items():
        weight, state = wire.whole(table)
        torch.testing.assert_close(weight, parameters[table].detach(), rtol=1e-10, atol=1e-12)
        wanted = optimizer.state[parameters[table]]
        given = state_in_torch(name, found[0].step, state)
        assert set(given) == set(wanted) - {"momentum_buffer"}
        for column, value in given.items():
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(wanted[column]), rtol=1e-10, atol=1e-12
            )


def test_the_number_of_servers_and_the_order_of_parts_change_no_bit() -> None:
    one = trained_on_servers("Adagrad", 1, in_order=True)
    three = trained_on_servers("Adagrad", 3)
    for table in one.tables:
        assert torch.equal(one.whole(table)[0], three.whole(table)[0])


def test_only_rows_that_were_touched_travel_and_each_once() -> None:
    model = model_of()
    wire = Wire(model, SGD(tables_of(model), lr=0.1), 2)
    lookups = Lookups(wire.pull)
    pull_tables(model, lookups)
    for _ in range(2):  # two micro-batches of the same rows
        loss_of(model, torch.tensor([[3, 3, 9, 1], [1, 3, 9, 9]])).backward()
    # words: 1, 3, 9, and 2, 4, 10 by the layer that shares it, of which 2 is its padding
    assert wire.pulled == {"words.weight": 6, "sums.weight": 3, "means.weight": 3}
    wire.push_all(lookups)
    assert wire.pushed == {"words.weight": 5, "sums.weight": 3, "means.weight": 3}
    assert wire.tables["words.weight"][0].summed()[0].tolist() == [2, 5]
    with torch.no_grad():
        model(torch.tensor([[5, 5, 5, 5]]))
    wire.push_all(lookups)
    assert wire.pushed["words.weight"] == 5, "what is only looked at is not pushed"


def test_a_row_that_is_only_padding_keeps_its_moments() -> None:
    """Row 2 is touched in the first step by a layer of its own, then as padding alone."""
    ids = (torch.tensor([[2, 1, 7, 2]]), torch.tensor([[1, 1, 7, 7]]))  # the second layer adds 1
    model, whole = model_of(), model_of()
    optimizer = SparseAdam(tables_of(whole), lr=0.1)
    wire = Wire(model, optimizer, 2)
    lookups = Lookups(wire.pull)
    pull_tables(model, lookups)
    for one in ids:
        optimizer.zero_grad()
        loss_of(whole, one).backward()
        optimizer.step()
        loss_of(model, one).backward()
        wire.push_all(lookups)
        wire.apply()
    torch.testing.assert_close(
        wire.whole("words.weight")[0], whole.words.weight.detach(), rtol=1e-10, atol=1e-12
    )


def test_a_part_that_comes_twice_counts_once_and_a_step_not_made_leaves_nothing() -> None:
    table = RowTable(TablePlan("t", 7, 2, torch.float64), "SGD", 1, 2, {"lr": 1.0})
    ids, ones = torch.tensor([1, 5]), torch.ones(2, 2, dtype=torch.float64)
    assert table.add(ids, 3 * ones, part=1)
    assert table.add(ids[:1], ones[:1], part=0)
    assert not table.add(ids, 100 * ones, part=1)
    places, gradient = table.summed()
    assert places.tolist() == [0, 2] and gradient.tolist() == [[4, 4], [3, 3]]
    assert table.squares() == 2 * 16 + 2 * 9
    table.forget()
    assert table.apply({"lr": 1.0}) == 0 and not table.weight.any()
    assert table.add(ids, ones, part=0) and table.apply({"lr": 1.0}, factor=0.5) == 2
    assert table.pull(torch.tensor([1, 3, 5])).tolist() == [[-0.5] * 2, [0.0] * 2, [-0.5] * 2]
    for wrong in ([2], [5, 1], [1, 1], [9], [-1]):
        with pytest.raises(AssertionError):
            table.pull(torch.tensor(wrong))


def test_rowwise_adagrad_by_hand() -> None:
    """Gradient (3, 4): mean of squares 12.5; then (1, 1): 13.5. Row 1 is never touched."""
    table = RowTable(
        TablePlan("t", 2, 2, torch.float64),
        "RowwiseAdagrad",
        0,
        1,
        settings_of(RowwiseAdagrad([torch.zeros(1)], lr=0.5).param_groups[0]),
    )
    group = {"lr": 0.5, "lr_decay": 0.0, "eps": 0.0}
    table.add(torch.tensor([0]), torch.tensor([[3.0, 4.0]], dtype=torch.float64), part=0)
    table.apply(group)
    first = [-0.5 * 3 / 12.5**0.5, -0.5 * 4 / 12.5**0.5]
    assert table.weight.tolist() == [pytest.approx(first, rel=1e-14), [0, 0]]
    table.add(torch.tensor([0]), torch.ones(1, 2, dtype=torch.float64), part=0)
    table.apply(group)
    second = [value - 0.5 / 13.5**0.5 for value in first]
    assert table.weight.tolist() == [pytest.approx(second, rel=1e-14), [0, 0]]
    assert table.state["sum"].tolist() == [[pytest.approx(13.5)], [0]]


@pytest.mark.parametrize("shape", [(6, 4), (6,), (5, 3, 2)])
def test_rowwise_adagrad_takes_dense_gradients_and_sparse_ones(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense, sparse = (nn.Parameter(start.clone()) for _ in "12")
    optimizers = [RowwiseAdagrad([p], lr=0.3, lr_decay=0.2) for p in (dense, sparse)]
    rows = torch.tensor([[4, 1, 4]])
    for step in range(3):
        values = (step + 1) * start[:3] + 1
        sparse.grad = torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)
        dense.grad = sparse.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(dense, sparse, rtol=1e-12, atol=1e-14)
    assert torch.equal(dense[0], start[0]) and not torch.equal(dense[4], start[4])
    assert optimizers[0].state[dense]["sum"].shape == (shape[0], *[1] * (len(shape) - 1))
