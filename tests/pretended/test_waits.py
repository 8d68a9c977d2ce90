"""How often the host waits for the device in a step; evaluation and the first steps apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

OnDevice = Callable[..., None]
AT_ONCE = {"single": 3, "ddp": 3, "zero1": 3, "fsdp": 4}
"""Seen: the end of a rank's own passes, the tally, the norm; under `fsdp`, who called what."""


def waits(on_device: OnDevice, folder: Path, strategy: str, optimizer: str) -> list[dict[str, int]]:
    """Of three usual steps, by the line that waits."""
    fields = {"samples": 24, "optimizer_name": optimizer}
    argument = {"fields": fields, "job": {"strategy": strategy}, "out": str(folder / "out")}
    on_device(1 if strategy == "single" else 2, "waits_of_a_step", argument)
    steps = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    assert len(steps) == 3
    return steps


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("strategy", AT_ONCE)
def test_the_host_waits_so_often(on_device: OnDevice, tmp_path: Path, strategy: str) -> None:
    """A bound of what was seen: with fewer, make it smaller."""
    steps = waits(on_device, tmp_path, strategy, "sgd")
    assert max(sum(step.values()) for step in steps) <= AT_ONCE[strategy], steps


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("strategy", AT_ONCE)
def test_a_fused_optimizer_waits_for_the_step_before_alone(
    on_device: OnDevice, tmp_path: Path, strategy: str
) -> None:
    for step in waits(on_device, tmp_path, strategy, "fused"):
        assert {where.partition(":")[0] for where in step} == {"torch/ahead/rows.py"}, step
        assert sum(step.values()) == 2  # until its own passes are over, and then for its row
