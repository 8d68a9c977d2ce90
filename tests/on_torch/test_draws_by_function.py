"""What forward and loss draw by a function of torch belongs to the samples, whatever passes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import silent_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import Micro, Piece
from allranks.torch import Trainer
from allranks.torch.data.batch import samples_in
from allranks.torch.model.layers import Scope
from allranks.torch.random.keyed_rng import ALL, COLUMNS, ROWS, Keys, Readings, keys_here
from allranks.torch.random.torch_functions import catch
from conftest import Train

CPU = torch.device("cpu")
SHARDS = (Piece(0, 0, 3, 3), Piece(1, 0, 4, 4), Piece(2, 0, 4, 4))
CUTS: list[list[Micro]] = [  # one rank, two, three, and a micro-batch within a shard
    [SHARDS],
    [SHARDS[:2], SHARDS[2:]],
    [SHARDS[:1], SHARDS[1:2], SHARDS[2:]],
    [SHARDS[:1], (Piece(1, 0, 2, 4),), (Piece(1, 2, 4, 4), SHARDS[2])],
]
Draws = Callable[[Tensor], Tensor]


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope(0, CPU)
    scope.keys.by_function = True
    catch()
    yield scope
    scope.leave()


def of_module(make: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> Draws:
    torch.manual_seed(0)
    module = make().double().train()
    return lambda x: call(module, x)


def new(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def self_attention(x: Tensor) -> Tensor:
    by_heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(by_heads, by_heads, by_heads, dropout_p=0.3).flatten(1)


def encoder(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.2, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


KINDS: dict[str, Draws] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.3),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "AlphaDropout": nn.AlphaDropout(0.2),
    "attention": self_attention,
    "MultiheadAttention, weights": of_module(
        lambda: nn.MultiheadAttention(6, 2, 0.3, batch_first=True), lambda m, x: m(x, x, x)[0]
    ),
    "MultiheadAttention": of_module(
        lambda: nn.MultiheadAttention(6, 2, 0.3, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
    ),
    "MultiheadAttention, positions first": of_module(
        lambda: nn.MultiheadAttention(6, 2, 0.3),
        lambda m, x: m(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    ),
    "TransformerEncoder": of_module(encoder, lambda m, x: m(x)),
    "TransformerEncoder, norm first": of_module(lambda: encoder(True), lambda m, x: m(x)),
    "LSTM": of_module(
        lambda: nn.LSTM(6, 4, 2, dropout=0.4, batch_first=True), lambda m, x: m(x)[0]
    ),
    "LSTM, positions first": of_module(
        lambda: nn.LSTM(6, 4, 3, dropout=0.4),
        lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1),
    ),
    "GRU": of_module(lambda: nn.GRU(6, 4, 2, dropout=0.4, batch_first=True), lambda m, x: m(x)[0]),
    "RNN": of_module(lambda: nn.RNN(6, 4, 2, dropout=0.4, batch_first=True), lambda m, x: m(x)[0]),
    "rand": lambda x: x + torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(len(x), 1, 1),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x + torch.randint(-3, 9, (len(x), 1, 1)),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_": lambda x: new(x).bernoulli_(torch.sigmoid(x)),
    "normal, means": lambda x: torch.normal(x),
    "normal, deviations": lambda x: torch.normal(0.5, x.abs()),
    "normal, both": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: new(x).normal_(1, 2),
    "uniform_": lambda x: new(x).uniform_(-2, 2),
    "exponential_": lambda x: new(x).exponential_(2),
    "geometric_": lambda x: new(x).geometric_(0.3),
    "cauchy_": lambda x: new(x).cauchy_(),
    "log_normal_": lambda x: new(x).log_normal_(),
    "randperm of features": lambda x: x[..., torch.randperm(6)],
    "multinomial": lambda x: torch.multinomial(x.abs().sum(1), 2),
    "multinomial, replaced": lambda x: torch.multinomial(x.abs().sum(1), 5, replacement=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.4, training=True),
    "rrelu_": lambda x: F.rrelu(x.clone(), 0.1, 0.4, training=True, inplace=True),
    "RReLU": nn.RReLU(),
    "stochastic depth": lambda x: x * (torch.rand(len(x), 1, 1) > 0.3),
    "a number for the layer": lambda x: x * torch.rand(()),
    "a mask over features": lambda x: x * torch.rand(6),
    "a mask over positions and features": lambda x: x * torch.rand(1, 5, 6),
}


def outputs(scope: Scope, draw: Draws, data: Tensor, cut: list[Micro]) -> Tensor:
    found, row = [], 0
    for pieces in cut:
        count = samples_in(pieces)
        scope.enter(3, pieces, count)
        found.append(draw(data[row : row + count]))
        row += count
    return torch.cat(found)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_drawn_does_not_know_what_goes_through_together(name: str, scope: Scope) -> None:
    """Equal however the batch is cut, other in another step, and torch's generator stands still."""
    data = torch.randn(11, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = outputs(scope, KINDS[name], data, CUTS[0])
    for cut in CUTS:
        torch.manual_seed(5)
        torch.testing.assert_close(
            outputs(scope, KINDS[name], data, cut), wanted, rtol=1e-10, atol=0
        )
    scope.enter(4, SHARDS, 11)
    before = torch.get_rng_state()
    assert not torch.equal(KINDS[name](data), wanted)
    assert torch.equal(torch.get_rng_state(), before)
    scope.leave()
    assert not torch.equal(KINDS[name](data), KINDS[name](data)), "outside of a pass it is torch's"
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (lambda x: x.uniform_(1, 3), 2, 1 / 3),
        (lambda x: x.normal_(1, 2), 1, 4),
        (lambda x: x.exponential_(2), 0.5, 0.25),
        (lambda x: x.geometric_(0.25), 4, 12),
        (lambda x: x.bernoulli_(0.3), 0.3, 0.21),
        (lambda x: x.random_(2, 12), 6.5, 8.25),
        (lambda x: x.log_normal_(0, 0.25), 1.0317, 0.0686),
        (lambda x: x.copy_(torch.multinomial(torch.tensor([1.0, 0, 3]), len(x), True)), 1.5, 0.75),
    ],
)
def test_distributions_are_those_of_torch(
    draw: Draws, mean: float, variance: float, scope: Scope
) -> None:
    """Mean and variance, within 5 deviations and 3 %."""
    scope.enter(0, SHARDS, 11)
    numbers = draw(torch.empty(110_001, dtype=torch.float64))
    assert abs(float(numbers.mean()) - mean) < 5 * (variance / numbers.numel()) ** 0.5
    assert float(numbers.var()) == pytest.approx(variance, rel=0.03)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        small = torch.empty(11, 5000, dtype=kind).uniform_()
        assert (
            small.min() >= 0
            and small.max() < 1
            and small.float().mean() == pytest.approx(0.5, abs=0.01)
        )


def test_a_generator_of_ones_own_and_what_cannot_be_keyed_stay_torchs(scope: Scope) -> None:
    scope.enter(0, SHARDS, 11)
    own = torch.Generator().manual_seed(3)
    drawn = torch.rand(11, 2, generator=own)
    assert torch.equal(drawn, torch.rand(11, 2, generator=torch.Generator().manual_seed(3)))
    before = torch.get_rng_state()
    torch.empty(11, dtype=torch.int64).random_()
    assert not torch.equal(torch.get_rng_state(), before), "the witness must see it"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.bernoulli(x + 1.5),
        lambda x: torch.bernoulli(x * math.nan),
        lambda x: x.bernoulli_(x - 1),
        lambda x: x.bernoulli_(1.5),
        lambda x: x.uniform_(1, 0),
        lambda x: x.normal_(0, -1),
        lambda x: torch.normal(0.0, x - 1),
        lambda x: x.exponential_(0.0),
        lambda x: x.geometric_(1.0),
        lambda x: x.cauchy_(0, -1),
        lambda x: x.log_normal_(0, -1),
        lambda x: torch.randint(5, 5, (11,)),
        lambda x: torch.randint(0, 300, (11,), dtype=torch.uint8),
        lambda x: torch.multinomial(x, 2, replacement=True),
        lambda x: torch.multinomial(x - 1, 2, replacement=True),
        lambda x: torch.multinomial(x * math.nan, 2, replacement=True),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(wrong: Draws, scope: Scope) -> None:
    with pytest.raises(RuntimeError) as plain:
        wrong(torch.zeros(11, 3))
    scope.enter(0, SHARDS, 11)
    with pytest.raises(RuntimeError) as keyed:
        wrong(torch.zeros(11, 3))
    assert str(keyed.value) == str(plain.value)


def test_numbers_that_forward_seeds_are_those_of_the_seed(scope: Scope) -> None:
    """A projection that is fixed by its seed is the same in every step, as in plain torch."""
    scope.enter(0, SHARDS, 11)
    keyed = torch.randn(4, 4)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        drawn = torch.randn(4, 4)
    torch.testing.assert_close(
        drawn, torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), rtol=0, atol=0
    )
    again = torch.randn(4, 4)
    scope.enter(0, SHARDS, 11)
    assert torch.equal(torch.randn(4, 4), keyed) and torch.equal(torch.randn(4, 4), again)


def test_an_empty_tensor_draws_nothing_and_counts(scope: Scope) -> None:
    found = []
    for rows in (0, 11):
        scope.enter(0, SHARDS, 11)
        assert torch.rand(rows, 0).shape == (rows, 0) and F.dropout(torch.ones(0, 3)).shape == (
            0,
            3,
        )
        found.append(torch.rand(11))
    assert torch.equal(*found)


def test_a_permutation_of_as_many_as_there_are_samples_is_one_for_all(scope: Scope) -> None:
    orders = []
    for pieces, samples in ((SHARDS, 11), (SHARDS[:1], 3), ((Piece(1, 2, 3, 4),), 1)):
        scope.enter(0, pieces, samples)
        orders.append(torch.randperm(11))
    assert all(torch.equal(order, orders[0]) for order in orders)
    assert sorted(orders[0].tolist()) == [*range(11)]


def test_the_loss_over_a_batch_and_stages_draw_what_is_keyed_for_them(scope: Scope) -> None:
    scope.enter(0, SHARDS, 11)
    for elsewhere in (lambda: scope.key(0, -4), lambda: scope.key_stage(1)):
        elsewhere()
        before = torch.get_rng_state()
        torch.rand(11)
        assert not torch.equal(torch.get_rng_state(), before)


def test_backward_that_computes_again_draws_the_same(scope: Scope) -> None:
    scope.enter(0, SHARDS, 11)
    moment = scope.moment()
    data = torch.ones(11, 6)
    first = F.dropout(F.dropout(data, 0.3), 0.3)
    with scope.again(moment):
        assert torch.equal(F.dropout(F.dropout(data, 0.3), 0.3), first)
    assert scope.calls == {-6: 2}


@pytest.mark.parametrize(
    ("seen", "then"),
    [
        ([((64,), 8), ((64,), 5)], "64 along dimension 0 for 8 samples"),
        ([((64,), 8), ((64,), 4)], "64 along dimension 0 for 8 samples"),
        ([((5, 8, 3), 8), ((5, 7, 3), 8)], "5 along dimension 0"),
        ([((8, 4, 4), 4)], "both be the samples"),
        ([((4, 4, 6), 4), ((4, 3, 6), 3)], "4 along dimension 0"),
        ([((5, 8), 8), ((5, 4), 4)], "(5, 8) for 8 samples"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(
    seen: list[tuple[tuple[int, ...], int]], then: str
) -> None:
    readings = Readings()
    *before, last = seen
    for shape, samples in before:
        readings.read("uniform()", 0, shape, samples)
    with pytest.raises(RequestError, match="Generator of your own") as error:
        readings.read("uniform()", 0, *last)
    assert then in error.value.found


def test_readings() -> None:
    readings = Readings()
    for samples in (8, 5):
        assert readings.read("a", 0, (2 * samples, 7), samples) == ROWS
        assert readings.read("a", 1, (7, samples, 3), samples) == COLUMNS
        assert readings.read("a", 2, (), samples) == ALL
        assert readings.read("a", 3, (13, 2), samples) == ALL
        assert bool(readings.untried()) == (samples == 8), "rows for one number of samples only"
    with pytest.raises(RequestError, match="as ranks see it"):
        readings.agree(lambda own: [own, told(known=[[1, 3, ROWS, 8, [8, 1, 1]]])])
    with pytest.raises(RequestError, match="more with more"):
        readings.agree(lambda own: [own, told(known=[[3, 2, ALL, 4, [13, 1]]])])
    assert readings.agree(lambda own: [own, told()]) == []


def told(known: Any = (), draws: Any = (), orders: Any = ()) -> str:
    return json.dumps({"known": known, "draws": draws, "orders": orders})


def test_what_no_second_look_sees_is_named_by_the_draws_themselves() -> None:
    """Under `fsdp` no shard is computed again: an order of samples, and a loop over them."""
    readings = Readings()
    readings.read_order("randperm()", 0, 16, 8)
    assert "randperm() of shape (16,) for 8 samples" in readings.untried()
    readings.read_order("randperm()", 0, 16, 4)
    assert readings.agree(lambda own: [own]) == [] and not readings.untried()
    readings.read_order("randperm()", 1, 8, 8)
    [found] = readings.agree(lambda own: [own, told(known=[[1, -1, ALL, 3, [3]]])])
    assert "an order of the samples" in found
    readings.read_order("randperm()", 1, 3, 3)
    readings.end_pass(3)
    count, order = readings.agree(lambda own: [own, told(draws=[3, 4])])
    assert "an order of the samples" in order and "draws 3 or 4 times in a pass" in count


def test_keys_of_no_sample_differ_from_all_of_samples() -> None:
    scope = Scope(0, CPU)
    scope.enter(0, SHARDS, 11)
    keys: Keys = scope.keys
    shared = keys.of_all(1)
    scope.calls.clear()
    assert not (keys.of_rows(1, (11,), "") == shared).all(1).any()


@pytest.mark.slow
def test_a_loop_over_samples_is_named_where_no_shard_is_computed_again(train: Train) -> None:
    result = train("silent_tasks:OrdersInLoop", ranks=2, steps=2, strategy="fsdp")
    found = result.summary["witness"]["found"]
    assert any("times in a pass" in text for text in found), found


class Fails(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        F.dropout(input, 0.3)
        raise ZeroDivisionError


class Failing(silent_tasks.Base):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(silent_tasks.FEATURES, 3), Fails())


def test_after_a_failed_step_the_process_draws_from_torch_again() -> None:
    with pytest.raises(ZeroDivisionError), Trainer(Failing(), Job()) as trainer:
        trainer.step(next(iter(trainer.batches())))
    before = torch.get_rng_state()
    torch.rand(22, 2)
    assert keys_here() is None and not torch.equal(torch.get_rng_state(), before)
