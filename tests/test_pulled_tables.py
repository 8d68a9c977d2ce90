"""The layers of a worker whose tables are on servers: what they hold, compute and refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam

from allranks.errors import RequestError
from allranks.torch.parameter_server.pulled_tables import Lookups, find_tables, pull_tables
from allranks.torch.parameter_server.row_table import RULES, check_group, rule_name
from limited_memory import Limited
from rows_wire import Wire

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch itself


class Clicks(nn.Module):
    """A table of 1 MiB, and a dense layer."""

    rows, dim = 1 << 14, 8

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.rows, self.dim, sparse=True, dtype=torch.float64)
        self.dense = nn.Linear(self.dim, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.table(ids)).square().sum()  # type: ignore[no-any-return]


def test_a_table_of_four_times_the_memory_of_a_worker_trains() -> None:
    """The servers have memory of their own: they are outside of the limit, as processes are."""
    torch.manual_seed(0)
    whole = Clicks()
    optimizer = Adagrad([whole.table.weight], lr=0.1)
    limit = whole.table.weight.nbytes // 4
    wire = Outside(whole, optimizer, 2)
    with torch.device("meta"):
        model = Clicks()
    lookups = Lookups(wire.pull)
    pull_tables(model, lookups)
    model.dense = nn.Linear(Clicks.dim, 1, dtype=torch.float64)
    model.dense.load_state_dict(whole.dense.state_dict())
    with Limited(limit) as used:
        wire.limited = used
        for step in range(8):
            model(batch_of(step)).backward()
            wire.push_all(lookups)
            wire.apply()
    assert 0 < used.most < limit
    for step in range(8):
        optimizer.zero_grad()
        whole(batch_of(step)).backward()
        optimizer.step()
    assert sum(wire.pulled.values()) > Clicks.rows // 16
    weight = wire.whole("table.weight")[0]
    torch.testing.assert_close(weight, whole.table.weight.detach(), rtol=1e-10, atol=1e-12)
    with Limited(limit), pytest.raises(MemoryError):
        Clicks()


def batch_of(step: int) -> Tensor:
    return torch.randint(0, Clicks.rows, (64, 4), generator=torch.Generator().manual_seed(step))


class Outside(Wire):
    """Servers whose memory is not the worker's."""

    limited: Limited

    def push(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        with self.limited.elsewhere():
            super().push(table, ids, gradient)

    def apply(self) -> None:
        with self.limited.elsewhere():
            super().apply()

    def pull(self, table: str, ids: Tensor) -> Tensor:
        with self.limited.elsewhere():
            found = super().pull(table, ids)
        self.limited.count(found.untyped_storage())  # it arrives in the worker
        return found


def test_lookups_that_are_none_or_wrong() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 2, sparse=True, padding_idx=4, dtype=torch.float64))
    wire = Wire(model, SGD(model.parameters(), lr=1.0), 2)
    whole = model[0](torch.tensor([4, 4, 1]), torch.tensor([0, 2, 2]))
    lookups = Lookups(wire.pull)
    pull_tables(model, lookups)
    assert torch.equal(model[0](torch.tensor([4, 4, 1]), torch.tensor([0, 2, 2])), whole)
    none = model[0](torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert none.tolist() == [[0, 0]] * 3
    for wrong in (9, -1):
        with pytest.raises(IndexError, match=r"table '0.weight' has rows 0 to 8"):
            model(torch.tensor([[wrong]]))
    with pytest.raises(RequestError, match="reads the whole table"):
        model[0].weight  # noqa: B018


def test_a_frozen_table_is_pulled_and_never_pushed() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True))
    model[0].weight.requires_grad_(False)
    wire = Wire(model, SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1)
    pull_tables(model, lookups := Lookups(wire.pull))
    assert not model(torch.tensor([1, 2])).requires_grad
    wire.push_all(lookups)
    assert wire.pulled["0.weight"] == 2 and not wire.pushed


class OwnForward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, 2 * self.weight)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (tied, "it is a weight of '1' too, a Linear"),
        (lambda: OwnForward(4, 2, sparse=True), "OwnForward has a forward of its own"),
        (lambda: nn.Embedding(4, 2, sparse=True, max_norm=1.0), "max_norm=1.0"),
        (lambda: nn.Embedding(4, 2, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True, mode="max"), "mode='max'"),
    ],
)
def test_a_table_that_cannot_be_on_servers_is_refused(
    make: Callable[[], nn.Module], found: str
) -> None:
    with pytest.raises(RequestError, match=found):
        find_tables(make())


def test_an_optimizer_that_moves_untouched_rows_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    for optimizer, found in (
        (Adam([weight]), "Adam, which has no rule for rows"),
        (SGD([weight], lr=0.1, momentum=0.9), "SGD with momentum=0.9"),
        (Adagrad([weight], weight_decay=0.1), r"Adagrad with weight_decay=0.1"),
    ):
        with pytest.raises(RequestError, match=found):
            rule_name(optimizer, weight, "table")
    for name in RULES:
        check_group(name, {"lr": 0.1}, "table")
