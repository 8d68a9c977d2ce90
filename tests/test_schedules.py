"""Schedules against numbers worked out by hand, and what holds for any of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import contract_tasks
import foreign_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.training.engine.trainer import scheduled_steps
from allranks.training.schedules import (
    Schedule,
    constant,
    cosine,
    linear_scaling,
    linear_warmup,
    polynomial,
    product,
    schedule_of,
    steps,
    then,
    warmup_lr,
)

EPOCH = 100
TF_CNN_FACTORS = (0.1, 0.01, 0.001, 0.0001)
TF_CNN = product(
    linear_scaling(512, warmup=5 * EPOCH, start="zero"),
    steps([epoch * EPOCH for epoch in (30, 60, 80, 90)], TF_CNN_FACTORS),
)
LEGACY_LARS = product(linear_scaling(1024, warmup=10), polynomial(100, power=2))

GOLDEN: dict[str, tuple[Schedule, float, dict[int, float]]] = {  # schedule, base rate, rates
    "constant": (constant(), 0.1, {0: 0.1, 10**9: 0.1}),
    "a factor": (constant(0.5), 0.1, {0: 0.05}),
    "warm-up": (linear_warmup(4), 1.0, {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 5: 1.0}),
    "warm-up from a tenth": (linear_warmup(9, start=0.1), 1.0, {0: 0.1, 1: 0.2, 8: 0.9, 9: 1.0}),
    "cosine": (cosine(6), 1.0, {0: 1.0, 2: 0.75, 3: 0.5, 4: 0.25, 6: 0.0, 7: 0.0}),
    "cosine, all of it": (
        cosine(10, warmup=4, floor=0.2),
        1.0,
        {0: 0.0, 1: 0.25, 4: 1.0, 6: 0.8, 7: 0.6, 8: 0.4, 10: 0.2, 99: 0.2},
    ),
    "line": (polynomial(10, warmup=2), 1.0, {0: 0.0, 1: 0.5, 2: 1.0, 6: 0.5, 10: 0.0, 11: 0.0}),
    "square": (polynomial(10, power=2, floor=0.5), 1.0, {0: 1.0, 5: 0.625, 10: 0.5}),
    "steps": (
        steps((30, 60, 80), (0.1, 0.01, 0.001)),
        1.0,
        {0: 1.0, 29: 1.0, 30: 0.1, 59: 0.1, 60: 0.01, 79: 0.01, 80: 0.001, 99: 0.001},
    ),
    "steps by one factor": (steps((3, 5), 0.1), 1.0, {2: 1.0, 3: 0.1, 4: 0.1, 5: 0.01}),
    "steps up": (steps((1,), (2.0,)), 1.0, {0: 1.0, 1: 2.0}),
    "no steps": (steps((), 0.1), 1.0, {0: 1.0, 9: 1.0}),
    "Goyal": (
        linear_scaling(2048, warmup=100),
        0.1,
        {0: 0.1, 1: 0.107, 50: 0.45, 100: 0.8, 101: 0.8},
    ),
    "scaling alone": (linear_scaling(64), 0.1, {0: 0.025, 7: 0.025}),
    "scaled down": (linear_scaling(128, warmup=2), 1.0, {0: 1.0, 1: 0.75, 2: 0.5}),
    "tf_cnn": (
        TF_CNN,
        0.128,
        {
            0: 0.0,
            250: 0.128,
            500: 0.256,
            3000: 0.0256,
            6000: 0.00256,
            8500: 0.000256,
            9000: 2.56e-5,
        },
    ),
    "LARS": (LEGACY_LARS, 1.0, {0: 1.0, 5: 2.5 * 0.95**2, 50: 1.0}),
    "DeepSpeed": (
        warmup_lr(0.0, 1e-3, 1000),
        1e-3,
        {0: 0.0, 1: 1.0034e-4, 9: 3.3333e-4, 99: 6.6667e-4, 999: 1e-3, 1000: 1e-3, 5000: 1e-3},
    ),
    "DeepSpeed, linear": (
        warmup_lr(2e-4, 1e-3, 8, "linear"),
        1e-3,
        {0: 2e-4, 1: 3e-4, 4: 6e-4, 8: 1e-3, 9: 1e-3},
    ),
    "DeepSpeed, one step": (warmup_lr(0.5, 1.0, 1), 1.0, {0: 0.5, 1: 1.0, 2: 1.0}),
    "then": (
        then(linear_warmup(2), 2, then(constant(1.0), 3, steps((1,), 0.5))),
        1.0,
        {0: 0.0, 1: 0.5, 2: 1.0, 4: 1.0, 5: 1.0, 6: 0.5},
    ),
    "product of nothing": (product(), 1.0, {0: 1.0}),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rates(name: str) -> None:
    schedule, base, wanted = GOLDEN[name]
    found = {step: base * schedule(step) for step in wanted}
    assert found == pytest.approx(wanted, rel=5e-5, abs=1e-12)


@given(total=st.integers(1, 5000), floor=st.floats(0, 1), data=st.data())
def test_what_falls_first_rises_and_never_jumps(
    total: int, floor: float, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    power = data.draw(st.floats(1, 4))
    steepest = {
        cosine(total, warmup, floor): math.pi / 2,
        polynomial(total, power, warmup, floor): power,
    }
    for schedule, slope in steepest.items():
        factors = [schedule(step) for step in range(total + 3)]
        assert factors[warmup] == 1.0 and factors[-3:] == [floor] * 3
        for step, (now, after) in enumerate(pairwise(factors)):
            if step < warmup:
                assert now < after <= now + 1 / warmup + 1e-12
            else:
                assert now - slope / (total - warmup) - 1e-12 <= after <= now + 1e-15


@given(
    batch_size=st.integers(1, 100_000),
    per=st.integers(1, 1000),
    warmup=st.integers(0, 1000),
    start=st.sampled_from(["base", "zero"]),
)
def test_a_scaled_rate_goes_straight_to_its_end(
    batch_size: int, per: int, warmup: int, start: str
) -> None:
    schedule = linear_scaling(batch_size, per, warmup, start)  # type: ignore[arg-type]
    scale, first = batch_size / per, float(start == "base")
    factors = [schedule(step) for step in range(warmup + 2)]
    assert factors[-2:] == [scale, scale]
    for step, factor in enumerate(factors[:warmup]):
        assert factor == pytest.approx(first * (1 - step / warmup) + scale * step / warmup)


@given(steps=st.integers(1, 3000), part=st.floats(0, 1), kind=st.sampled_from(["log", "linear"]))
def test_the_warm_up_of_deepspeed_only_rises(steps: int, part: float, kind: str) -> None:
    schedule = warmup_lr(part, 1.0, steps, kind)  # type: ignore[arg-type]
    factors = [schedule(step) for step in range(steps + 3)]
    assert factors[0] == pytest.approx(part) and factors[-1] == 1.0
    assert all(now <= after + 1e-15 for now, after in pairwise(factors))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: linear_warmup(0), "0"),
        (lambda: cosine(0), "0"),
        (lambda: cosine(10, warmup=10), "a warm-up as long as the whole"),
        (lambda: polynomial(10, warmup=-1), "-1"),
        (lambda: steps((3, 3), 0.1), "boundaries [3, 3] and factors [0.1, 0.010000000000000002]"),
        (lambda: steps((3,), (1.0, 0.1)), "boundaries [3] and factors [1.0, 0.1]"),
        (lambda: linear_scaling(0), "0"),
        (lambda: linear_scaling(256, start="one"), "'one'"),  # type: ignore[arg-type]
        (lambda: warmup_lr(1.0, 0.1, 5), "rates from 1.0 to 0.1, kind 'log'"),
        (lambda: warmup_lr(0.0, 0.1, 5, "cos"), "rates from 0.0 to 0.1, kind 'cos'"),  # type: ignore[arg-type]
        (lambda: then(constant(), 0, constant()), "0"),
    ],
)
def test_what_is_no_schedule_is_refused(make: Callable[[], Schedule], found: str) -> None:
    with pytest.raises(RequestError) as refused:
        make()
    assert refused.value.found == found


@dataclass(kw_only=True)
class ToTheEnd(contract_tasks.Plain):
    """The rate falls in even steps to none at the end of the job."""

    epochs: int = 2

    def schedule(self, step: int, total: int) -> float:  # type: ignore[override]
        return 1 - step / total


@pytest.mark.parametrize(("asked", "total"), [(None, 10), (4, 4)])
def test_a_schedule_knows_the_number_of_steps(asked: int | None, total: int) -> None:
    """101 samples in batches of 24 are five steps of an epoch; `--steps` comes before epochs."""
    with Trainer(ToTheEnd(), Job(steps=asked)) as trainer:
        rates = [trainer.step(batch).learning_rate for batch in trainer.batches()]
        made = trainer.strategy.step.rates.initial[0]["lr"]
    assert rates == pytest.approx([made * (1 - step / total) for step in range(total)])


@pytest.mark.parametrize(
    ("given", "per_epoch", "total"),
    [(None, 5, 10), (300, 5, 300), (300, None, 300), (None, None, 2)],
)
def test_a_check_of_two_steps_has_the_total_of_the_training(
    given: int | None, per_epoch: int | None, total: int
) -> None:
    data = SimpleNamespace(batches=SimpleNamespace(expected_steps=per_epoch))
    job = Job(steps=2, trace=True, schedule_steps=given)
    trainer = SimpleNamespace(job=job, task_data=data, task=ToTheEnd())
    assert scheduled_steps(trainer) == total  # type: ignore[arg-type]


class Uneven(foreign_tasks.Lengths):
    """Some of the batches of `Lengths`: epochs differ in their number."""

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), int(torch.randint(1, 6, ())))


@dataclass(kw_only=True)
class InUnevenEpochs(foreign_tasks.InBuckets):
    epochs: int = 4

    def train_data(self) -> Any:
        loader = super().train_data()
        return DataLoader(loader.dataset, batch_sampler=Uneven(), collate_fn=loader.collate_fn)

    def schedule(self, step: int, total: int) -> float:  # type: ignore[override]
        return 1 + total


def test_the_total_is_the_same_after_a_resume_where_epochs_differ() -> None:
    """It is what the data said before any was read: `len` of the sampler for each epoch."""
    with Trainer(InUnevenEpochs()) as trainer:
        batches = trainer.batches()
        rate = trainer.step(next(batches)).learning_rate
        sizes = trainer.task_data.batches.steps_per_epoch
        while trainer.progress.epoch < 2:
            assert trainer.step(next(batches)).learning_rate == rate
        state = copy.deepcopy(trainer.state())
        assert sizes != 6 != trainer.task_data.batches.steps_per_epoch
        batches.close()
    with Trainer(InUnevenEpochs()) as trainer:
        made = trainer.strategy.step.rates.initial[0]["lr"]
        trainer.load_state(state)
        batches = trainer.batches()
        assert trainer.step(next(batches)).learning_rate == rate == pytest.approx(made * 25)
        batches.close()


def test_a_total_may_be_asked_for_by_name() -> None:
    def schedule(step: int, *, total: int) -> float:
        return step / total

    assert schedule_of(schedule, lambda: 4)(1) == 0.25


def test_a_schedule_with_a_total_needs_one() -> None:
    known = schedule_of(lambda step, total: step / total, lambda: None)
    with pytest.raises(RequestError, match="--steps N"):
        known(0)
    assert schedule_of(lambda step, rate=0.5: rate, lambda: None)(0) == 0.5
