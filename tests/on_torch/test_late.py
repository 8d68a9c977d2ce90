"""`ddp:late=1`: what goes on under it, what its checkpoints hold, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.errors import ProgramError, RequestError
from allranks.strategies.card import Reference
from allranks.strategies.cards import CARDS
from allranks.torch.parallel.data.late_ddp import PendingGradient
from conftest import Train


def test_a_sum_is_under_way_while_the_next_step_computes(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "late_workers:sums_under_way", None)


@pytest.mark.slow
def test_a_training_that_goes_on_begins_with_the_gradient_that_was_left(train: Train) -> None:
    """Bit by bit: 5 steps on 2 ranks and 4 on 3 are 9 on one; a regularizer, clipping, decay."""
    flags: dict[str, Any] = {"strategy": "ddp:late=1", "bitwise": True}
    for program in ("contract_tasks:Words", "contract_tasks:Images"):
        whole = train(program, **flags, steps=9).summary
        half = train(program, **flags, ranks=2, steps=5, checkpoint_every=5)
        on = train(program, **flags, ranks=3, steps=9, resume=str(half.run_dir)).summary
        assert on["weights_sha256"] == whole["weights_sha256"]
    with pytest.raises(RequestError, match="holds a gradient that is not applied yet"):
        train("contract_tasks:Images", strategy="ddp", steps=9, resume=str(half.run_dir))


def test_what_is_on_its_way_is_scaled_once() -> None:
    flat = torch.tensor([2.0, 4.0])
    reducer, bucket = SimpleNamespace(finish=lambda: None), SimpleNamespace(views={"w": flat})
    buckets: Any = SimpleNamespace(reducer=reducer, gradients=[flat], buckets=[bucket])
    leaving = PendingGradient(buckets, step=0, factor=0.5)
    for _ in range(2):
        assert leaving.wait(["w"])["w"].tolist() == [1.0, 2.0]


def test_another_start_is_another_training(train: Train) -> None:
    half = train(
        "contract_tasks:Words", strategy="ddp:late=1(after=2)", steps=5, checkpoint_every=5
    )
    with pytest.raises(RequestError, match="follows from the step"):
        train("contract_tasks:Words", strategy="ddp:late=1", steps=9, resume=str(half.run_dir))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"precision": "fp16"}, "--precision fp16"),
        ({"on_bad_step": "skip"}, "--on-bad-step skip"),
        ({"spike": 10.0}, "--spike 10.0"),
    ],
)
def test_steps_that_may_not_count_are_refused(
    flags: dict[str, Any], found: str, train: Train
) -> None:
    with pytest.raises(RequestError) as refused:
        train("contract_tasks:Plain", strategy="ddp:late=1", steps=2, **flags)
    assert refused.value.found == found


def test_a_step_that_goes_bad_stops_before_it_is_applied(train: Train) -> None:
    inject = "nan@rank=1,step=3"
    with pytest.raises(ProgramError, match="step 3: the loss is nan"):
        train("contract_tasks:Plain", strategy="ddp:late=1", ranks=2, steps=6, inject=inject)


def test_two_promises_are_one_simulation() -> None:
    card = CARDS["ddp"]
    found = card.guarantee_of(card.read_options({"reduce": "bf16", "late": "1"}))
    assert isinstance(found, Reference)
    assert "rounds the gradient" in found.simulation and "step n - 1" in found.simulation
