"""Steps that run ahead of the host: equal to the bit to steps that are read at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ahead_workers
from ahead_workers import Ahead, Unfreezes, Words, check_the_same, numbers_read, trained
from allranks.errors import BadStep
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.training.progress import Asked

OVERFLOWS = {"precision": "fp16", "loss_scale": "dynamic:initial=1e9,every=2"}


@pytest.mark.parametrize(
    ("task", "how"),
    [
        (Ahead, {"bad": (4, 5, 11), "on_bad_step": "skip"}),
        (Ahead, {"bad": (4, 11), "on_bad_step": "warn", "number": 14}),
        (partial(Ahead, momentum=True), {"bad": (3,), "on_bad_step": "skip"}),
        (partial(Ahead, clip_norm=None), {"number": 30, **OVERFLOWS}),
        (Words, {"bad": (6,), "on_bad_step": "skip"}),
        (Unfreezes, {"unfreeze": 5, "number": 16}),
    ],
)
def test_what_is_read_late_is_what_is_read_at_once(task: Any, how: dict[str, Any]) -> None:
    check_the_same(task, **how)


def until(trainer: Trainer, bad: int) -> None:
    """Six steps, of which one goes bad."""
    for batch in trainer.batches(steps=6):
        if batch.index == bad:
            trainer.strategy.step.poison_next()
        trainer.step(batch)


@pytest.mark.parametrize("bad", [4, 5])
def test_a_job_stops_with_the_weights_before_its_bad_step(bad: int) -> None:
    """One step late, or where the loop ends: what is found is the same sample."""
    with numbers_read(late=False):
        wanted = trained(Ahead(), number=bad)
    with numbers_read(late=True):
        trainer = Trainer(Ahead(), Job(threads=1))
        with pytest.raises(BadStep, match=f"step {bad}: the loss is nan.*loss of sample"), trainer:
            until(trainer, bad)
        found = [tensor for _, tensor in trainer.strategy.full_state()]
    assert trainer.progress.batch_index == bad
    assert all(torch.equal(*pair) for pair in zip(found, wanted.weights, strict=True))


def test_what_a_rank_was_asked_for_is_heard_one_step_late() -> None:
    with numbers_read(late=True), Trainer(Ahead(), Job(threads=1)) as trainer:
        heard = []
        for batch in trainer.batches(steps=7):
            trainer.heartbeat._all[0] = float(batch.index == 4)
            heard.append(trainer.step(batch).asked)
    assert [asked == Asked(stop=True) for asked in heard] == [False] * 5 + [True, False]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_ranks_that_read_late_agree(strategy: str, on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "ahead_workers:same_on_ranks", strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_no_step_waits_for_its_device(strategy: str, on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "ahead_workers:waits_of", strategy)


def test_no_step_of_one_process_waits_for_its_device() -> None:
    ahead_workers.waits_of("single")
