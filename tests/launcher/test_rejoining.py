"""Processes that are started again while the others go on: how often, and what counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allranks.launcher.attempts import Rejoining

VICTIM = {"peer_lost": True, "passing": True}


@pytest.mark.parametrize(
    ("restarts", "deaths", "comes_again"),
    [
        (1, [(1, {}), (0, VICTIM)], [True, True]),  # a server, and the scheduler with it
        (1, [(0, VICTIM), (1, {})], [True, True]),  # the victim is seen first
        (1, [(1, {}), (1, {})], [True, False]),
        (1, [(0, VICTIM), (0, VICTIM)], [True, False]),
        (2, [(1, {}), (0, VICTIM), (1, {})], [True, True, True]),
        (9, [(1, {**VICTIM, "passing": False})], [False]),
        (0, [(0, VICTIM)], [False]),
    ],
)
def test_what_falls_with_another_is_no_other_fault(
    restarts: int, deaths: list[Any], comes_again: list[bool]
) -> None:
    role: Any = SimpleNamespace(resumes=True, rejoins=0)
    ours = Rejoining()
    ours.begin()
    found = [ours.counts(rank, role, failure, restarts) for rank, failure in deaths]
    assert found == comes_again
