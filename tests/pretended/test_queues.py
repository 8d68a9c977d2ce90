"""Pipelines where a group is one queue without tags, as NCCL's are: nothing stands still."""

from __future__ import annotations

import pytest

from allranks.strategies.pipeline_schedules import SCHEDULES
from pretended.queues import StandsStill, run_ranks

CHUNKS = {"interleaved": (2, 3)}


@pytest.mark.slow(but=1, most=7)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_stands_still(schedule: str, ranks: int) -> None:
    """With micro-batches of one size, of two in turn, and a new size among known ones."""
    for chunks in CHUNKS.get(schedule, (1,)):
        for micros in (1, 2, 5, 8):
            in_turn = [4 + number % 2 for number in range(micros)]
            later = [6 if number == micros // 2 else 4 for number in range(micros)]
            steps = [[4] * micros, in_turn, later]
            run_ranks(schedule, ranks, chunks, steps, ring=chunks > 1, connects_late=True)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (3, 2), (4, 3)])
def test_a_ring_whose_ranks_send_and_receive_by_one_group_stands_still(
    ranks: int, chunks: int
) -> None:
    with pytest.raises(StandsStill):
        run_ranks("interleaved", ranks, chunks, [[4] * 4], ring=False)
