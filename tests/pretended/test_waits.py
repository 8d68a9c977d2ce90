"""How often the host waits for the device in a step; evaluation and the first steps apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OnDevice = Callable[..., None]
WAITS = {
    **{"single": 1, "ddp": 2, "zero1": 1, "fsdp": 1, "interleaved": 1, "tensor": 1},
    **{"ddp-plain": 2, "independent": 1, "sparse-loco:every=50": 1},
}
"""Until all numbers are there; where passes wait for no other rank, until they are over before."""
READS = {"torch/step/deferred_results.py", "torch/comm/comm.py"}
TASKS = {"interleaved": "Chain", "tensor": "Chain", "expert": "Mixture"}


def waits(
    on_device: OnDevice, folder: Path, strategy: str, optimizer: str, **job: Any
) -> list[dict[str, Any]]:
    """Of three usual steps of each rank: by the line that waits, and how often the device is left
    idle."""
    ranks, fields = 1 if strategy == "single" else 2, {"samples": 24, "optimizer_name": optimizer}
    argument = {"task": TASKS.get(strategy, "Small"), "fields": fields}
    out = folder / "out"
    argument |= {"job": {"strategy": strategy, **job}, "out": str(out)}
    on_device(ranks, "waits_of_a_step", argument)
    steps = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(steps) == 3 * ranks
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in WAITS if name != "tensor"])
def test_the_host_waits_once_where_an_optimizer_is_not_fused(
    on_device: OnDevice, tmp_path: Path, strategy: str
) -> None:
    """For all numbers of the step together, before its update; nothing is launched in between."""
    for step in waits(on_device, tmp_path, strategy, "sgd"):
        assert sum(step["waits"].values()) == WAITS[strategy] and step["stops"] == 1, step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", WAITS)
def test_a_fused_optimizer_waits_for_the_step_before_alone(
    on_device: OnDevice, tmp_path: Path, strategy: str
) -> None:
    for step in waits(on_device, tmp_path, strategy, "fused"):
        assert {where.partition(":")[0] for where in step["waits"]} <= READS, step
        assert sum(step["waits"].values()) == WAITS[strategy], step


@pytest.mark.slow
def test_steps_that_are_read_at_once_wait_in_exchange(on_device: OnDevice, tmp_path: Path) -> None:
    """Three times: for the end of the own passes, and for what all ranks have found."""
    for step in waits(on_device, tmp_path, "ddp", "fused", spike=1e9):
        assert sum(step["waits"].values()) == 3, step


@pytest.mark.slow
def test_a_mixture_of_experts_waits_once(on_device: OnDevice, tmp_path: Path) -> None:
    """For the rows that go where; and a forward pass once more, for a layer that was left out."""
    mixtures, passes = 2, 1
    for step in waits(on_device, tmp_path, "expert", "fused"):
        assert step["stops"] == mixtures + passes + 1, step
