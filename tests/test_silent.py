"""No task trains otherwise on another number of ranks, in silence.

Each task of `silent_tasks` is trained on 1, 2 and 3 ranks in float64. Either all weights are equal,
or every run on many ranks says so within its first steps: it is refused, or the witness names it.
Of tasks that are right, no run may say a word.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import silent_tasks
from allranks.errors import AllranksError
from allranks.torch import Task
from conftest import Train

RANKS = (1, 2, 3)
RIGHT = [
    *("Base", "WeightNorm", "ScalingHook", "Centralised", "ContrastiveOverBatch"),
    *("PaddedWithWeight", "ClassesOfASet", "DropsLast", "TextsOverBatch", "LayersOfASet"),
    *("Unfrozen", "Frozen", "Clamped", "GroupAdded", "ComplexBuffer", "ComplexParameter"),
    *("SquaresAdded", "Usual", "UsualWithAdam", "SparseTable", "SparseClipped"),
    *("NumpyInOptimizer", "NumpyInRegularizer", "DrawnAnew", "NoiseInLoss", "FunctionalDropout"),
    *("DropPath", "Gumbel", "RandomRelu", "AlphaDropout", "ScriptedDropout", "AttentionDropout"),
    *("ProductDropout", "LstmDropout"),
]
"""These train alike on any number of ranks, and nothing is said of them."""

TASKS = sorted(
    name
    for name, value in vars(silent_tasks).items()
    if inspect.isclass(value) and issubclass(value, Task) and value.__module__ == "silent_tasks"
)
SOME = [*RIGHT[::4], *[name for name in TASKS if name not in RIGHT][::5]]
REST = [name for name in TASKS if name not in SOME]


@pytest.mark.slow(most=7)
@pytest.mark.cases("name", SOME, exhaustive=REST)
def test_a_task_trains_alike_on_any_ranks_or_says_so(name: str, train: Train) -> None:
    runs = {ranks: outcome(train, f"silent_tasks:{name}", ranks) for ranks in RANKS}
    words = {ranks: said for ranks, (said, _) in runs.items()}
    if name in RIGHT:
        assert not any(words.values()), words
    if not all(words[ranks] for ranks in RANKS[1:]):
        found = {ranks: weights for ranks, (_, weights) in runs.items() if weights is not None}
        assert len(found) == len(RANKS), words
        for ranks in RANKS[1:]:
            size = difference(found[1], found[ranks])
            assert size < 1e-10, f"{ranks} ranks: {size:.1e}, and nothing was said: {words}"


def outcome(train: Train, program: str, ranks: int) -> tuple[list[str], dict[str, Any] | None]:
    """What a run said of itself, and its weights if it came to its end."""
    try:
        result = train(program, ranks=ranks, steps=12, precision="fp64", max_restarts=0)
    except AllranksError as error:
        return [str(error)], None
    said = result.summary["witness"]["found"]
    return said, load_file(result.run_dir / "weights.safetensors")


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest norm-relative difference of a tensor."""
    assert one.keys() == other.keys()
    sizes = [
        float(np.linalg.norm(other[name] - one[name]) / max(np.linalg.norm(one[name]), 1e-30))
        for name in one
        if np.issubdtype(one[name].dtype, np.floating)
    ]
    return max(sizes)
