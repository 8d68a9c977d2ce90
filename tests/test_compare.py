"""Two traces side by side: what is found first, how it is called, and what is no difference."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from allranks.tools.check.compare import (
    Comparison,
    RecordedTrace,
    Tolerance,
    compare,
    noise_between,
)
from allranks.training.record.trace import START

Rows = dict[int, dict[str, Any]]
Tensors = dict[int, dict[str, Any]]
TOLERANCE = Tolerance(1e-9, 1e-9)
STEPS = (START, 0, 1)
RANKS = 2


def made() -> tuple[list[Rows], Tensors]:
    """The rows of two ranks, and the tensors of the leader; all numbers are exact."""
    rows: list[Rows] = []
    for rank in range(RANKS):
        own = {
            step: {
                "step": step,
                "ids": [10 * step + 2 * rank, 10 * step + 2 * rank + 1],
                "samples": 4,
                "weight": 4.0,
                "loss": 0.5 / (step + 2),
                "learning_rate": 0.1,
                "grad_norm": 3.0,
                "overflow": False,
            }
            for step in STEPS
        }
        rows.append(own)
    tensors: Tensors = {}
    for step in STEPS:
        random = np.random.default_rng(step + 5)
        tensors[step] = {
            f"{stage}/{name}": random.normal(size=(3, 2))
            for stage in ("gradient", "weight", "buffer")
            for name in ("v", "w" if stage != "buffer" else "norm.running_mean")
        }
    return rows, tensors


def trace(folder: Path, rows: list[Rows], tensors: Tensors) -> RecordedTrace:
    """On disk; each rank holds the tensors of the leader, but for the `digests` of its own."""
    (folder / "tensors").mkdir(parents=True)
    for rank, own in enumerate(rows):
        held = [
            {**row, "digests": {**digests_of(tensors[step]), **row.get("digests", {})}}
            for step, row in own.items()
        ]
        lines = "".join(json.dumps(row) + "\n" for row in held)
        (folder / f"rank-{rank:03d}.jsonl").write_text(lines)
    for step, found in tensors.items():
        name = "start" if step == START else f"step-{step:08d}"
        save_file(found, folder / "tensors" / f"{name}.safetensors")
    return RecordedTrace(folder)


def digests_of(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: tensor.tobytes().hex() for name, tensor in tensors.items()}


def alone(rows: list[Rows]) -> Rows:
    """One process, whose samples are those of all ranks."""
    ids = {step: [n for own in rows for n in own[step]["ids"]] for step in rows[0]}
    return {step: {**row, "ids": ids[step]} for step, row in rows[0].items()}


Change = Callable[[list[Rows], Tensors], object]


def compared(tmp_path: Path, change: Change, tolerance: Tolerance = TOLERANCE) -> Comparison:
    """One process, whose samples are those of both ranks, beside two ranks after `change`."""
    rows, tensors = made()
    reference = trace(tmp_path / "one", [alone(rows)], tensors)
    rows, tensors = copy.deepcopy((rows, tensors))
    change(rows, tensors)
    return compare(reference, trace(tmp_path / "two", rows, tensors), tolerance)


def nothing(rows: list[Rows], tensors: Tensors) -> None:
    """No change."""


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, nothing, Tolerance(0.0, 0.0, exact=True))
    assert found.first is None and found.steps == 2 and found.largest == 0


def set_row(rank: int, step: int, name: str, value: Any) -> Change:
    return lambda rows, tensors: rows[rank][step].update({name: value})


def times(name: str, factor: float, step: int = 1) -> Change:
    def change(rows: list[Rows], tensors: Tensors) -> None:
        tensors[step][name] = tensors[step][name] * factor

    return change


def as_before(name: str) -> Change:
    def change(rows: list[Rows], tensors: Tensors) -> None:
        tensors[1][name] = tensors[0][name]

    return change


def all_gradients(factor: float) -> Change:
    def change(rows: list[Rows], tensors: Tensors) -> None:
        for name in ("gradient/v", "gradient/w"):
            tensors[1][name] = tensors[1][name] * factor

    return change


@pytest.mark.parametrize(
    ("change", "step", "stage", "tensor", "words"),
    [
        (set_row(1, 0, "ids", [0, 1]), 0, "samples", None, "2 samples twice"),
        (set_row(1, 0, "ids", [2, 9]), 0, "samples", None, "1 samples "
                                                           "missing, 1 not of this batch"),
        (set_row(1, 0, "ids", [3, 2]), 0, "samples", None, "in another order"),
        (set_row(0, 1, "samples", 5), 1, "samples", None, "counted twice or lost"),
        (set_row(0, 1, "weight", 4.5), 1, "weight", None, "4.5, not 4.0"),
        (set_row(0, 1, "loss", 0.25), 1, "loss", None, "other random numbers"),
        (set_row(0, 0, "learning_rate", 0.2), 0, "learning rate", None, "stepped by each rank"),
        (set_row(1, 1, "digests", {"buffer/v": "x"}), 1, "buffer", "v", "rank 1 does not hold"),
        (set_row(1, 1, "digests", {"weight/w": "x"}), 1, "weight", "w", "each rank updates by "
                                                                        "itself"),
        (times("weight/w", 2.0, START), START, "weight", "w", "before the first step"),
        (times("weight/w", 1 + 1e-6), 1, "weight", "w", "an update made with another gradient"),
        (as_before("weight/w"), 1, "weight", "w", "an update that was lost"),
        (times("buffer/norm.running_mean", 3.0), 1, "buffer", "norm.running_mean", "BatchNorm "
                                                                                   "statistics of "
                                                                                   "one rank"),
        (times("buffer/v", 3.0), 1, "buffer", "v", "a buffer that the model writes itself"),
        (all_gradients(2.0), 1, "gradient", "v", "a sum where the mean is wanted"),
        (all_gradients(0.5), 1, "gradient", "v", "divided twice"),
        (times("gradient/w", 1.25), 1, "gradient", "w", "scaled by 1.25"),
        (lambda rows, tensors: tensors[0].pop("gradient/w"), 0, "gradient", "w", "the candidate "
                                                                                 "has none"),
        (lambda rows, tensors: rows[0].pop(1), 1, "number of steps", None, "the candidate ended"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(
    tmp_path: Path, change: Change, step: int, stage: str, tensor: str | None, words: str
) -> None:
    first = compared(tmp_path, change).first
    assert first is not None
    assert (first.step, first.stage, first.tensor) == (step, stage, tensor)
    assert words in str(first)


def test_what_is_within_the_tolerance_is_measured_and_is_no_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, times("weight/w", 1 + 1e-10))
    assert found.first is None
    assert found.largest == pytest.approx(1e-10, rel=1e-3)
    assert found.largest_at == "weight w at step 1"


def test_under_bitwise_one_bit_is_a_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, times("weight/w", 1 + 2**-52), Tolerance(1e-9, 1e-9, exact=True))
    assert found.first is not None and found.first.tensor == "w"


def test_a_weight_whose_gradient_is_rounding_proves_nothing(tmp_path: Path) -> None:
    rows, tensors = made()
    tensors[1]["gradient/w"] = np.full((3, 2), 1e-18)
    one = trace(tmp_path / "one", [alone(rows)], tensors)
    tensors[1]["weight/w"] = tensors[1]["weight/w"] + 1e-3
    found = compare(one, trace(tmp_path / "two", rows, tensors), TOLERANCE)
    assert found.first is None and found.passed_over == ("w",)


def test_a_run_that_goes_on_is_longer(tmp_path: Path) -> None:
    rows, tensors = made()
    both = [{step: own[step] for step in STEPS[:2]} for own in rows]
    one = trace(tmp_path / "one", [alone(both)], tensors)
    first = compare(one, trace(tmp_path / "two", rows, tensors), TOLERANCE).first
    assert first is not None and first.text == "the reference ended before"


def test_a_tensor_of_few_numbers_is_allowed_more_for_rounding(tmp_path: Path) -> None:
    """Four times what is found for one number, and hardly more than that for many."""
    rows, tensors = made()
    sizes = {"gradient/many": 10_000, "gradient/one": 1}
    for step in STEPS:
        tensors[step] = {name: np.full(n, (step + 2) / n**0.5) for name, n in sizes.items()}
    one = trace(tmp_path / "one", [alone(rows)], tensors)
    for name in sizes:
        tensors[1][name] = tensors[1][name] * (1 + 1e-6)
    noise = noise_between(one, trace(tmp_path / "two", rows, tensors), TOLERANCE)
    assert noise["gradient/one"] == pytest.approx(4 * 1e-6, rel=1e-3)
    assert noise["gradient/many"] == pytest.approx(1.03 * 1e-6, rel=1e-3)
