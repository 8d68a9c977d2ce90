"""Steps that run ahead of the host: equal to the bit to steps that are read at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import ahead_workers
from ahead_workers import Ahead, Unfreezes, Words, check_the_same, numbers_read, told, trained
from allranks.errors import BadStep
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.optimizers.layerwise import LAMB
from allranks.torch.step.deferred_results import (
    DeferredResults,
    can_skip_on_device,
    notes_on_update,
)
from allranks.torch.step.in_flight import InFlightSteps
from allranks.training.progress import RankRequests

OVERFLOWS = {"precision": "fp16", "loss_scale": "dynamic:initial=1e9,every=2"}


@pytest.mark.slow(but=2, most=5)
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
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_read_late_is_what_is_read_at_once(
    task: Any, how: dict[str, Any], fused: bool
) -> None:
    """One that is not fused reads all numbers of a step together, before its update."""
    check_the_same(partial(task, fused=fused), **how)


def test_a_fused_optimizer_takes_the_flag_whatever_the_default_type_is() -> None:
    default, weight = torch.get_default_dtype(), torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer: Any = AdamW([weight], fused=True)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer.found_inf, optimizer.grad_scale = DeferredResults(torch.device("cpu")).skip, None
        optimizer.step()
    finally:
        torch.set_default_dtype(default)
    assert weight.detach().lt(1.0).all()


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
    assert [asked == RankRequests(stop=True) for asked in heard] == [False] * 5 + [True, False]


def test_what_a_rank_was_asked_for_in_a_step_that_is_held_back_is_heard() -> None:
    """A request for a checkpoint is told once: the step that is made again tells it again."""
    with (
        numbers_read(late=True),
        Trainer(Ahead(), Job(threads=1, on_bad_step="skip")) as trainer,
    ):
        heard = []
        for batch in trainer.batches(steps=7):
            if batch.index == 4:
                trainer.strategy.step.poison_next()
            trainer.heartbeat._all[1] += float(batch.index == 4)
            heard.append(trainer.step(batch).asked)
    assert heard.count(RankRequests(save=True)) == 1 and heard[5] == RankRequests(save=True)


def test_a_step_that_is_read_at_once_waits_for_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is held back changes nothing after it, and averages round alike in either step."""
    how: dict[str, Any] = {"bad": (5,), "on_bad_step": "skip"}
    with numbers_read(late=True):
        wanted = trained(Ahead(), **how)
        can = InFlightSteps._can_stay_unread
        monkeypatch.setattr(
            InFlightSteps,
            "_can_stay_unread",
            lambda self, b: b.index not in (6, 9) and can(self, b),
        )
        found = trained(Ahead(), **how)
    assert found.unread != wanted.unread
    assert [told(result) for result in found.results] == [told(r) for r in wanted.results]
    assert all(torch.equal(*pair) for pair in zip(found.weights, wanted.weights, strict=True))
    assert found.average and wanted.average
    assert all(torch.equal(found.average[name], wanted.average[name]) for name in found.average)


def test_a_step_that_raises_leaves_the_one_before_it_to_be_read() -> None:
    """Who catches it goes on as if numbers were read at once."""

    def ended(late: bool) -> tuple[list[torch.Tensor], list[str]]:
        results = []
        with numbers_read(late=late), Trainer(Ahead(), job) as trainer:
            for batch in trainer.batches(steps=9):
                if batch.index == 4:
                    trainer.strategy.step.poison_next()
                if batch.index == 5:  # as where a device has no memory left
                    patch.setattr(trainer.strategy.step, "apply", no_memory)
                    with pytest.raises(MemoryError):
                        trainer.step(batch)
                    patch.undo()
                results.append(trainer.step(batch))
            return [t.clone() for _, t in trainer.weights()], [told(r) for r in results]

    def no_memory(*ignored: Any) -> None:
        raise MemoryError

    job, patch = Job(threads=1, on_bad_step="skip"), pytest.MonkeyPatch()
    (found, saw), (wanted, said) = ended(True), ended(False)
    assert saw == said and all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_numbers_read_before_an_update_bring_what_was_asked_for_with_their_step() -> None:
    with (
        numbers_read(late=True),
        Trainer(Ahead(fused=False), Job(threads=1, on_bad_step="skip")) as trainer,
    ):
        heard = []
        for batch in trainer.batches(steps=8):
            if batch.index == 5:
                trainer.strategy.step.poison_next()
            trainer.heartbeat._all[0] = float(batch.index in (4, 5))
            heard.append(trainer.step(batch).asked)
    assert [asked == RankRequests(stop=True) for asked in heard] == [
        index in (4, 5) for index in range(8)
    ]


def test_a_device_says_where_an_optimizer_could_be_fused() -> None:
    weights, device = [torch.nn.Parameter(torch.ones(2))], torch.device("cuda")
    (note,) = notes_on_update(AdamW(weights), device)
    assert "optimizer AdamW is not fused: the host waits" in note
    assert notes_on_update(AdamW(weights), torch.device("cpu")) == []
    for silent in (AdamW(weights, fused=True), LAMB(weights)):
        assert notes_on_update(silent, device) == []


class Clamped(AdamW):
    """Does more than torch's own after each update."""

    def step(self, closure: Any = None) -> None:
        super().step()


def test_what_is_not_held_back_is_read_at_once() -> None:
    """A class of somebody else; and from its next step on, an optimizer that is hooked."""
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert can_skip_on_device(AdamW(weights, fused=True))
    assert not can_skip_on_device(AdamW(weights, foreach=True))
    assert not can_skip_on_device(Clamped(weights, fused=True))
    with numbers_read(late=True), Trainer(Ahead(), Job(threads=1)) as trainer:
        is_read = []
        for batch in trainer.batches(steps=9):
            if batch.index == 7:
                trainer.strategy.step.optimizer.register_step_post_hook(lambda *_: None)
            is_read.append(trainer.step(batch).is_read)
    assert is_read[4:] == [False, False, False, True, True]


TOGETHER = ["ddp", "zero1", "fsdp", "ddp-plain"]
APART = [
    "local-sgd:every=4",
    "independent",
    "local-sgd:every=5,after=3,state=reset",  # the step after a meeting is a bad one
    "diloco:every=8,overlap=1,after=0",
    "sparse-loco:every=6,after=2",
]


@pytest.mark.slow(most=9)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("strategy", [*TOGETHER, *APART])
def test_ranks_that_read_late_agree(
    strategy: str, fused: bool, on_ranks: Callable[..., Any]
) -> None:
    ema = None if strategy in APART else 0.9  # nobody has that of all learners
    fields = {"fused": fused, "ema": ema, "momentum": "state=reset" in strategy}
    on_ranks(2, "ahead_workers:same_on_ranks", {"strategy": strategy, "fields": fields})


def test_learners_hear_what_one_was_asked_for_where_they_meet(
    on_ranks: Callable[..., Any],
) -> None:
    on_ranks(2, "ahead_workers:learners_meet", None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_no_step_waits_for_its_device(strategy: str, on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "ahead_workers:waits_of", strategy)


def test_no_step_of_one_process_waits_for_its_device() -> None:
    ahead_workers.waits_of("single")
