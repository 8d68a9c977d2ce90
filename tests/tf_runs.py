"""What tests of the TensorFlow engine read of a run that is done."""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors.numpy import load_file

from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.start import Result


def weights(result: Result) -> dict[str, Any]:
    """The final weights by name."""
    return load_file(result.run_dir / "weights.safetensors")


def difference(one: Result, other: Result) -> float:
    """The largest norm-relative difference over all tensors."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(
        float(np.linalg.norm(ours[n] - t) / max(float(np.linalg.norm(t)), 1e-12))
        for n, t in theirs.items()
    )


def rows(result: Result) -> list[dict[str, Any]]:
    """What the metrics say of each step, but for the time."""
    found = list(read_rows(result.run_dir / "metrics.jsonl"))
    for row in found:
        del row["monotonic"]
    return found


def events(result: Result, name: str) -> list[dict[str, Any]]:
    return [row for row in read_events(result.run_dir) if row["event"] == name]
