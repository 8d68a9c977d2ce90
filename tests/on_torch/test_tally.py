"""The tally by itself: what one rank fills in, and what all read from the sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allranks.errors import ProgramError
from allranks.torch.model.layers import Scope
from allranks.torch.step.tally import POSITIONS, Tally, TallyLayout
from allranks.training.progress import NOTHING, RankRequests

SCOPE = Scope(0, torch.device("cpu"))
MODEL = nn.Linear(3, 2)


def layout() -> TallyLayout:
    return TallyLayout(MODEL, list(MODEL.parameters()))


def filled(
    by: TallyLayout, *micros: tuple[float, float, int], asked: RankRequests = NOTHING, step: int = 5
) -> Tally:
    """The tally of one leaf, of micro-batches (loss, weight, samples)."""
    tally = by.tally()
    for loss, weight, samples in micros:
        tally.add(torch.tensor(loss), weight, samples, SCOPE)
    tally.close(step, [True, True], asked)
    return tally


def test_micro_batches_add_up() -> None:
    by = layout()
    found = filled(by, (1.5, 4.0, 2), (2.0, 0.5, 3)).totals(5)
    assert (found.loss, found.weight, found.samples) == (3.5, 4.5, 5)
    assert found.requests == NOTHING and found.unused == ()


def test_a_tally_begins_anew_when_it_was_closed() -> None:
    """The same tensor, which the buckets set to zero, serves every step."""
    by = layout()
    tally = filled(by, (1.5, 4.0, 2))
    tally.tensor.zero_()
    tally.add(torch.tensor(1.0), 1.0, 1, SCOPE)
    tally.close(5, [True, True])
    again = tally.totals(5)
    assert (again.loss, again.weight, again.samples) == (1.0, 1.0, 1)


@pytest.mark.parametrize(
    "asked", [RankRequests(True, False), RankRequests(False, True), RankRequests(True, True)]
)
def test_what_any_rank_was_asked_for_reaches_all(asked: RankRequests) -> None:
    by = layout()
    total = filled(by, (1.0, 2.0, 2))
    for told in (asked, NOTHING):
        total.tensor.add_(filled(by, (1.0, 2.0, 2), asked=told).tensor)
    found = total.totals(5)
    assert found.requests == asked and (found.weight, found.samples) == (6.0, 6)


def test_a_parameter_is_unused_if_no_rank_used_it() -> None:
    by = layout()
    for used, wanted in (([False, True], (0,)), ([False, False], (0, 1)), ([True, True], ())):
        tally = by.tally()
        tally.add(torch.tensor(1.0), 1.0, 1, SCOPE)
        tally.close(5, used)
        tally.tensor.add_(tally.tensor.clone())
        assert tally.totals(5).unused == wanted


@pytest.mark.parametrize("other", [4, 6, 5 + POSITIONS // 2])
def test_the_sum_with_another_step_is_not_taken(other: int) -> None:
    by = layout()
    first = filled(by, (1.0, 1.0, 1))
    first.tensor.add_(filled(by, (1.0, 1.0, 1)).tensor)
    first.totals(5)
    mixed = filled(by, (1.0, 1.0, 1))
    mixed.tensor.add_(filled(by, (1.0, 1.0, 1), step=other).tensor)
    with pytest.raises(ProgramError, match="this one is at 5"):
        mixed.totals(5)
    with pytest.raises(ProgramError):
        filled(by, (1.0, 1.0, 1)).totals(5)
