"""How often the host waits for the device in a step; evaluation and the first steps apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

OnDevice = Callable[..., None]
WAITS_IN_A_STEP = {"single": 3, "ddp": 3, "zero1": 3, "fsdp": 5}
"""Seen: the row for the host, the norm for the guard, and one for each BatchNorm; what fsdp keeps
beside its parts costs two more."""


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("strategy", WAITS_IN_A_STEP)
def test_the_host_waits_so_often(on_device: OnDevice, tmp_path: Path, strategy: str) -> None:
    """A bound of what was seen: with fewer, make it smaller."""
    fields = {"samples": 24}
    argument = {"fields": fields, "job": {"strategy": strategy}, "out": str(tmp_path / "out")}
    on_device(1 if strategy == "single" else 2, "waits_of_a_step", argument)
    steps = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(steps) == 3
    assert max(sum(step.values()) for step in steps) <= WAITS_IN_A_STEP[strategy], steps
