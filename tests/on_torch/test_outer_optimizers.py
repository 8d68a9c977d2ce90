"""Outer optimizers beside sequences worked out by hand."""

from __future__ import annotations

import pytest
import torch

from allranks.torch.local_sgd.global_weights import (
    Average,
    BlockMomentum,
    Nesterov,
    OuterOptimizer,
    SlowMo,
)


def walk(optimizer: OuterOptimizer, found: list[float]) -> tuple[list[float], list[float]]:
    """The weight after each block, which began at 0, and where the next block begins."""
    weight = torch.zeros(1, dtype=torch.float64)
    weights, starts = [], []
    for one in found:
        optimizer.step(weight, torch.tensor([one], dtype=torch.float64), rate=0.1)
        weights.append(weight.item())
        starts.append(optimizer.start(weight).item())
    return weights, starts


def test_block_momentum_in_its_three_forms() -> None:
    once = [1.0, 0.0, 0.0, 0.0]
    paper, starts = walk(BlockMomentum(0.75), once)
    assert paper == pytest.approx([-1, -1.75, -2.3125, -2.734375])
    assert starts == pytest.approx([-1.75, -2.3125, -2.734375, -3.05078125])
    cntk, starts = walk(BlockMomentum(0.75, form="cntk"), once)
    assert cntk == pytest.approx([-1.75, -3.0625, -4.046875, -4.78515625])
    assert starts == cntk
    again = [1.0] * 3
    ends = {
        form: walk(BlockMomentum(1 - 1 / 8, form=form), again)[1]
        for form in ("paper", "cntk", "classical")
    }
    assert ends["paper"] == pytest.approx([-1.875, -4.515625, -7.826172], abs=1e-6)
    assert ends["cntk"] == pytest.approx([-1.875, -5.390625, -10.341797], abs=1e-6)
    assert ends["classical"] == pytest.approx([-1, -2.875, -5.515625], abs=1e-6)


def test_nesterov_goes_down_where_learners_went_down() -> None:
    weights, _ = walk(Nesterov(0.7, 0.9), [1.0, 1.0, 1.0])
    assert weights == pytest.approx([-1.33, -3.227, -5.6343])


def test_slow_momentum_is_in_units_of_the_inner_rate() -> None:
    weights, _ = walk(SlowMo(1.0, 0.5), [1.0, 1.0])
    assert weights == pytest.approx([-1, -2.5])
    slow = SlowMo(1.0, 0.5)
    weight = torch.zeros(1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    slow.step(weight, one, rate=0.1)
    slow.step(weight, one, rate=0.05)  # u = 0.5 * 10 + 20 = 25
    assert weight.item() == pytest.approx(-1 - 0.05 * 25)


def test_without_momentum_all_are_the_mean() -> None:
    found = [1.0, -3.0, 0.5]
    mean, _ = walk(Average(), found)
    for one in (Nesterov(1, 0), BlockMomentum(0), BlockMomentum(0, form="cntk"), SlowMo(1, 0)):
        assert walk(one, found)[0] == pytest.approx(mean)
