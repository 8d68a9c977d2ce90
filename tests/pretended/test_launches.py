"""How many kernels a step launches: as many for a long list of tensors as for a short one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OF_THE_MODEL = {"", "torch/step/losses.py"}
"""Lines of forward, and of autograd, which has none; under `fsdp` units are gathered there."""


@pytest.mark.slow
@pytest.mark.cases(
    ("strategy", "copies", "most"),
    [("ddp", 1, 1.05), ("single", 0, 1.1)],
    exhaustive=[("zero1", 0, 1.1)],
)
def test_launches_beside_a_loop_by_hand(
    on_device: Callable[..., None], tmp_path: Path, strategy: str, copies: int, most: float
) -> None:
    """A GPT of 12 layers; DDP of torch copies each gradient into its bucket."""
    argument = {"task": "Text", "job": {"strategy": strategy}, "out": str(tmp_path / "out")}
    on_device(1 if strategy == "single" else 2, "launches_beside_a_loop", argument)
    found = json.loads((tmp_path / "out").read_text())
    assert found["found"] <= most * (found["by_hand"] + copies * found["parameters"]), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("single", "fused"),
        ("ddp", "adamw"),
        ("zero1", "fused"),
        ("zero2", "adamw"),
        ("fsdp", "fused"),
    ],
)
def test_launches_do_not_follow_the_number_of_tensors(
    on_device: Callable[..., None], tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """Packing, sums, division, norm, clipping and update of 10 layers, and of 4.

    Two ranks cannot share their 9 rows evenly, so zero1 and zero2 copy them once more.
    """

    def launches(depth: int) -> Counter[str]:
        fields = {"samples": 24, "optimizer_name": optimizer, "depth": depth, "width": 9}
        fields["clip_norm"] = 0.5
        out = tmp_path / f"out-{depth}"
        argument = {"fields": fields, "job": {"strategy": strategy}, "out": str(out)}
        on_device(1 if strategy == "single" else 2, "launches_of_a_step", argument)
        return Counter(json.loads(out.read_text()))

    few, many = launches(1), launches(7)
    if optimizer == "fused" and strategy != "fsdp":  # its kernel divides and clips gradients
        assert not [line for line in many if "_foreach_mul_" in line], many
    more = {line for line in many | few if many[line] != few[line]}
    assert {line.partition(" ")[0].partition(":")[0] for line in more} <= OF_THE_MODEL, (few, many)
    assert more, "a model of more layers launches more"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("layer", "shape", "kernels"),
    [
        ("Dropout", (6, 5, 7), 2),  # the flags, and the product
        ("Dropout", (12, 8), 2),
        ("Dropout", (6, 2, 3, 8), 3),  # coordinates before the last two are added to the keys
        ("Dropout2d", (6, 4, 3, 3), 3),
    ],
)
def test_a_dropout_launches_few_kernels(
    on_device: Callable[..., None], layer: str, shape: tuple[int, ...], kernels: int
) -> None:
    argument = {"layer": layer, "shape": shape, "kernels": kernels}
    on_device(1, "dropout_as_on_the_cpu", argument)


@pytest.mark.slow
@pytest.mark.cases(
    ("fields", "most"),
    [
        ({"name": "gpt", "layers": 12, "dropout": 0.1, "batch_size": 4, "shards": 1}, 1.08),
        ({"name": "resnet20", "batch_size": 16, "shards": 1}, 1.19),
        ({"name": "resnet20", "batch_size": 16, "shards": 8}, 1.96),
    ],
    exhaustive=[({"name": "resnet50", "batch_size": 4, "shards": 1}, 1.0)],
)
def test_a_step_launches_little_more_than_one_by_hand(
    on_device: Callable[..., None], tmp_path: Path, fields: dict[str, Any], most: float
) -> None:
    """Bounds of what was seen: with fewer, make them smaller."""
    out = tmp_path / "out"
    argument = {"task": "BesideByHand", "fields": fields, "out": str(out)}
    on_device(1, "launches_beside_a_loop", argument)
    found = json.loads(out.read_text())
    assert found["found"] <= most * found["by_hand"], found
