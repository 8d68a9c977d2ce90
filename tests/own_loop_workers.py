"""Loops of one's own that leave something out, as each rank runs them."""

from __future__ import annotations

from typing import Any

import pytest

import contract_tasks
from allranks.errors import RequestError
from allranks.on_torch import Trainer


def _leader_evaluates_alone() -> None:
    with Trainer(contract_tasks.Images()) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        if trainer.world.is_leader:
            trainer.evaluate()


def alone(_: Any) -> int:
    """In a rank: the leader evaluates alone, after the loop."""
    with pytest.raises(RequestError, match="on every rank") as raised:
        _leader_evaluates_alone()
    assert "rank 1 at the end of the training" in raised.value.found
    return 0
