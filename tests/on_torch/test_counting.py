"""Bytes are counted at the process group, whoever calls it: DTensor and FSDP2 on three ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_what_torch_sends_itself_is_counted(on_ranks: Callable[..., Any]) -> None:
    on_ranks(3, "counting_workers:what_torch_sends_itself", None)


def test_a_peer_that_goes_away_is_told_as_by_any_other_collective(
    on_ranks: Callable[..., Any],
) -> None:
    on_ranks(3, "counting_workers:a_peer_goes_away", None)


@pytest.mark.slow
def test_trainings_one_after_the_other_leave_all_groups(on_ranks: Callable[..., Any]) -> None:
    on_ranks(4, "counting_workers:all_groups_are_left", None)
