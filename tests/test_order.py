"""The order of the data: a function of seed and epoch, and an accident if it ever changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.training.order import Order, random_key

# The first samples of epoch 0 and 1 of 100 samples under seed 0. If these change, every job that
# is run again or resumed sees its data in another order.
GOLDEN = {0: [97, 14, 7, 62, 90, 44, 69, 98], 1: [87, 37, 9, 56, 35, 40, 18, 84]}


def whole_epoch(order: Order, epoch: int) -> list[int]:
    return [int(i) for step in range(order.steps_per_epoch) for i in order.batch(epoch, step)]


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 64),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_an_epoch_is_a_permutation(samples: int, batch_size: int, seed: int, epoch: int) -> None:
    order = Order(samples, batch_size, seed, "keep")
    assert order.steps_per_epoch == -(-samples // batch_size)
    assert sorted(whole_epoch(order, epoch)) == list(range(samples))


def test_every_epoch_and_every_seed_has_another_order() -> None:
    orders = [
        whole_epoch(Order(100, 10, seed, "keep"), epoch) for seed in range(3) for epoch in range(5)
    ]
    assert len(set(map(tuple, orders))) == 15


def test_the_order_follows_nothing_but_seed_and_epoch() -> None:
    """Not the batch size, and not what was asked before."""
    small, large = Order(100, 7, 5, "keep"), Order(100, 30, 5, "keep")
    small.batch(9, 3)
    assert whole_epoch(small, 4) == whole_epoch(large, 4)
    again = small.batch(9, 3)
    assert np.array_equal(again, Order(100, 7, 5, "keep").batch(9, 3))


@pytest.mark.parametrize("epoch", GOLDEN)
def test_golden_order(epoch: int) -> None:
    assert Order(100, 8, 0, "keep").batch(epoch, 0).tolist() == GOLDEN[epoch]


def test_the_rest_of_an_epoch_is_kept_or_dropped() -> None:
    kept, dropped = Order(103, 10, 0, "keep"), Order(103, 10, 0, "drop")
    assert (kept.steps_per_epoch, len(kept.batch(0, 10))) == (11, 3)
    assert dropped.steps_per_epoch == 10
    assert whole_epoch(dropped, 0) == whole_epoch(kept, 0)[:100]
    assert [Order(100, 10, 0, last).steps_per_epoch for last in ("keep", "drop")] == [10, 10]
    assert [Order(9, 10, 0, last).steps_per_epoch for last in ("keep", "drop")] == [1, 0]


def test_a_key_is_the_same_on_every_machine() -> None:
    assert random_key(0, 1, 2) == 4450782424123420391
    assert 0 <= random_key(-1) < 2**63
    assert len({random_key(), random_key(0), random_key(0, 0), random_key(1, 0)}) == 4
