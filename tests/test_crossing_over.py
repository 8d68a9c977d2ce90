"""A checkpoint of any exact strategy on N ranks is that of any other on M: to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.export import TensorFiles
from allranks.checkpoint.folder import committed
from allranks.checkpoint.format import read_manifest
from conftest import Train

CHAIN = [
    *(("ddp", 4), ("fsdp", 2), ("tensor", 2), ("1f1b", 2), ("single", 1)),
    ("mesh:tensor=2,pipeline=2", 4),
    *(("zero2", 3), ("hsdp:shard=2", 4), ("model-parallel", 1), ("interleaved:chunks=2", 2)),
]


@pytest.mark.slow
def test_each_hands_on_what_it_took_up(train: Train) -> None:
    """Weights, optimizer, and where the data stands, through ten strategies without a step."""
    job: dict[str, Any] = {"steps": 3, "checkpoint_every": 3, "precision": "fp64"}
    handed_on = []
    for strategy, ranks in CHAIN:
        run = train("tensor_tasks:Stack", strategy=strategy, ranks=ranks, **job)
        handed_on.append(in_checkpoint(run.run_dir) | {"held": run.summary["weights_sha256"]})
        job["resume"] = str(run.run_dir)
    first = handed_on[0]
    assert len(first["tensors"]) == 9 + 9 + 9 + 9  # weights, two moments, and their counters
    for found in handed_on[1:]:
        assert found == first


def in_checkpoint(run_dir: Path) -> dict[str, Any]:
    """What all ranks hold together, tensors as whole bytes."""
    folder = committed(run_dir / "checkpoints")[-1]
    manifest = read_manifest(folder)
    shared = {path: t for path, t in manifest.tensors.items() if path.startswith("common/")}
    with TensorFiles(folder) as files:
        tensors = {path: bytes(files.bytes_of(path, t)) for path, t in shared.items()}
    return {"tensors": tensors, "step": manifest.step, "progress": manifest.progress}
