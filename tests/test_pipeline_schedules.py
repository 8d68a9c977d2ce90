"""Schedules as data: complete, free of deadlock, with the bubble and the memory of the papers."""

from __future__ import annotations

import pytest

from allranks.strategies.pipeline_schedules import SCHEDULES, Action, Schedule
from allranks.strategies.shards import balanced_ends
from pipeline_timing import SECONDS, SPLIT_SECONDS, bubble_fraction, duration, most_stashed

NAMES = list(SCHEDULES)


def kinds_of(name: str) -> str:
    return "FBW" if name == "zero-bubble" else "FB"


def chunks_of(name: str) -> tuple[int, ...]:
    return (1, 2, 3) if name == "interleaved" else (1,)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", NAMES)
def test_every_pass_is_made_once_in_an_order_that_ends(name: str) -> None:
    """Of any number of micro-batches, in groups of the ranks or not; backward in their order."""
    for ranks in range(1, 7):
        for micros in range(14):
            for chunks in chunks_of(name):
                schedule = SCHEDULES[name](ranks, micros, chunks)
                duration(schedule, SPLIT_SECONDS)  # raises where ranks wait for each other
                for rank, actions in enumerate(schedule):
                    stages = range(rank, ranks * chunks, ranks)
                    assert sorted(actions, key=str) == sorted(
                        (
                            Action(k, s, m)
                            for k in kinds_of(name)
                            for s in stages
                            for m in range(micros)
                        ),
                        key=str,
                    )
                    for stage in stages:
                        for kind in kinds_of(name):
                            made = [a.micro for a in actions if (a.kind, a.stage) == (kind, stage)]
                            assert made == list(range(micros))


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_that_of_the_formula(name: str) -> None:
    for ranks in (1, 2, 3, 4, 8):
        for micros in (ranks, 2 * ranks, 5 * ranks):
            for chunks in chunks_of(name):
                busy = 3 * micros * chunks  # one forward and two backward, for each
                schedule = SCHEDULES[name](ranks, micros, chunks)
                seconds = SPLIT_SECONDS if name == "zero-bubble" else SECONDS
                found = 1 - busy / duration(schedule, seconds)
                formula = bubble_fraction(name, ranks, micros, chunks)
                assert found == pytest.approx(formula, abs=1e-12)
    assert bubble_fraction("1f1b", 4, 8) == 3 / 11
    assert bubble_fraction("interleaved", 4, 8, 2) == 3 / 19
    assert bubble_fraction("zero-bubble", 4, 8) == 3 / 27


def test_zero_bubble_waits_as_the_paper_says() -> None:
    """(p - 1) (F + B - W), of as many micro-batches as ranks or more; W no longer than B."""
    for forward, back, weights in ((1, 1, 1), (1, 1.5, 0.5), (2, 1.25, 1)):
        seconds = {"F": forward, "B": back, "W": weights}
        for ranks in (2, 4, 8):
            for micros in (ranks, 3 * ranks + 1):
                waits = duration(SCHEDULES["zero-bubble"](ranks, micros, 1), seconds)
                waits -= micros * sum(seconds.values())
                assert waits == pytest.approx((ranks - 1) * (forward + back - weights))


def test_zero_bubble_keeps_no_more_than_1f1b_does_on_its_first_rank() -> None:
    for ranks in (1, 2, 4, 7):
        for micros in (1, 3, 4, 9, 30):
            schedule = SCHEDULES["zero-bubble"](ranks, micros, 1)
            assert {most_stashed(actions) for actions in schedule} == {min(micros, ranks)}


def test_one_forward_one_backward_keeps_less() -> None:
    """All of gpipe are stashed; of 1f1b as many as there are stages from here on."""
    for micros in (2, 4, 9):
        kept = [most_stashed(a) for a in SCHEDULES["1f1b"](4, micros, 1)]
        assert kept == [min(micros, 4 - rank) for rank in range(4)]
        assert [most_stashed(a) for a in SCHEDULES["gpipe"](4, micros, 1)] == [micros] * 4


def test_a_schedule_of_1f1b_as_it_is_drawn() -> None:
    drawn = [" ".join(map(str, actions)) for actions in SCHEDULES["1f1b"](2, 3, 1)]
    assert drawn == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]


def test_a_schedule_of_zero_bubble_as_it_is_drawn() -> None:
    drawn = [" ".join(map(str, actions)) for actions in SCHEDULES["zero-bubble"](2, 3, 1)]
    assert drawn == [
        "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2",
        "F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2",
    ]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    wrong: Schedule = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)),
    )
    with pytest.raises(ValueError, match=r"wait for each other: B0\.0, F1\.1"):
        duration(wrong)


@pytest.mark.parametrize(
    ("costs", "parts", "ends"),
    [([1, 1, 1, 1, 10, 1], 3, [4, 5, 6]), ([5, 4, 3, 2, 1], 2, [2, 5]), ([7], 1, [1])],
)
def test_layers_are_shared_out_so_that_the_dearest_stage_is_cheap(
    costs: list[int], parts: int, ends: list[int]
) -> None:
    assert balanced_ends(costs, parts) == ends
