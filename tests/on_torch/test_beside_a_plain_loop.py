"""Trainings beside the loop that anybody would write: one rank and two, every strategy, fp64.

What is only compared between ranks may be wrong on all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plain_tasks
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch.model.reals import read_tensors
from plain_workers import trained

TASKS = [
    *("ComplexWeight", "Rotary", "Waves", "Unfrozen", "UnfrozenInForward", "GroupAdded", "Groups"),
    *("SparseSGD", "SparseAdagrad", "SparseRows", "Adversarial", "Averaged"),
]
ALONE: list[dict[str, Any]] = [
    {"strategy": "single"},
    {"strategy": "single", "micro_batch": 4},
    {"strategy": "single", "bitwise": True},
    {"strategy": "dp:replicas=2"},
]
TOGETHER: list[dict[str, Any]] = [
    {"strategy": "ddp:bucket_mb=0.0001"},
    {"strategy": "ddp", "micro_batch": 4},
    {"strategy": "ddp-plain"},
    {"strategy": "ddp", "bitwise": True},
    {"strategy": "zero1:bucket_mb=0.0001"},
    {"strategy": "zero2", "micro_batch": 4},
    {"strategy": "zero1", "bitwise": True},
]
BY_ROWS = ("SparseRows",)
"""Their optimizer takes rows that some sample touched, and is not asked to take rows of a rank."""


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, (what, name)
        size = float((found[name] - tensor).abs().max() / max(float(tensor.abs().max()), 1e-9))
        assert size < 1e-12, (what, name, size)


@pytest.mark.slow(most=6)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # in torch's own Adagrad
@pytest.mark.parametrize("name", TASKS)
def test_one_rank_and_two_equal_a_plain_loop(
    name: str, on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    make = getattr(plain_tasks, name)
    wanted = plain_tasks.plain(make())
    bits = []
    for setting in ALONE:
        job = Job(precision="fp64", steps=plain_tasks.STEPS, **setting)
        found = trained(make(), job, World())
        assert_equal(found, wanted, str(setting))
        bits += [found] if setting.get("bitwise") else []
    settings = [s for s in TOGETHER if name not in BY_ROWS or "zero" not in s["strategy"]]
    argument = {"task": name, "settings": settings, "out": str(tmp_path)}
    on_ranks(2, "plain_workers:settings_in_turn", argument)
    for number, setting in enumerate(settings):
        for rank in range(2):
            found = read_tensors(tmp_path / f"{number}-{rank}.safetensors")
            assert_equal(found, wanted, f"{setting}, rank {rank}")
            bits += [found] if setting.get("bitwise") else []
    for found in bits[1:]:
        assert all(torch.equal(tensor, found[n]) for n, tensor in bits[0].items())
