"""Processes that are started again while the others go on: how often, and what counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.launcher import attempts as rejoining
from allranks.launcher.processes.process import Exit

VICTIM = {"event": "failed", "peer_lost": True, "passing": True}


@pytest.mark.parametrize(
    ("restarts", "deaths", "comes_again"),
    [
        (1, [(1, []), (0, [VICTIM])], [True, True]),  # a server, and the scheduler with it
        (1, [(0, [VICTIM]), (1, [])], [True, True]),  # the victim is seen first
        (1, [(1, []), (1, [])], [True, False]),
        (1, [(0, [VICTIM]), (0, [VICTIM])], [True, False]),
        (2, [(1, []), (0, [VICTIM]), (1, [])], [True, True, True]),
        (9, [(1, [{**VICTIM, "passing": False}])], [False]),
        (0, [(0, [VICTIM])], [False]),
    ],
)
def test_what_falls_with_another_is_no_other_fault(
    restarts: int, deaths: list[Any], comes_again: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    role = SimpleNamespace(resumes=True, rejoins=0)
    plan: Any = SimpleNamespace(
        job=SimpleNamespace(max_restarts=restarts),
        process_set=SimpleNamespace(members=[SimpleNamespace(role=role)] * 2),
        ranks=["scheduler", "server"],
    )
    said: dict[int, list[Any]] = {}
    monkeypatch.setattr(rejoining, "events_of", lambda _dir, rank, _attempt: said.get(rank, []))
    ours = rejoining.Rejoining()
    ours.begin(plan, lambda planned, again: planned)
    found = []
    for rank, rows in deaths:
        said[rank] = rows
        found.append(ours.again(Path(), 0, rank, Exit(0, 1, 0.0)) is not None)
    assert found == comes_again
