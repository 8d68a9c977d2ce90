"""Checkpoints of several ranks: loaded on any other number, committed for all ranks or for none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from allranks.checkpoint.format import read_manifest, step_folder
from allranks.launcher.supervisor import Ended

OnRanks = Callable[..., Ended]


def worker(name: str) -> str:
    return f"checkpoint_workers:{name}"


def test_four_ranks_save_and_any_number_loads(on_ranks: OnRanks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(4, worker("save_steps"), {"folder": str(folder), "steps": [1, 2, 2, 3, 4, 5]})
    steps = sorted(path.name for path in folder.iterdir())
    assert steps == ["step-00000003", "step-00000004", "step-00000005"], "keep is 3"
    manifest = read_manifest(step_folder(folder, 5))
    assert len(manifest.files) == manifest.ranks == 4
    sizes = [file.bytes for file in manifest.files.values()]
    assert max(sizes) < 2 * min(sizes), "what all hold is shared out by bytes"
    assert all(len(tensor.chunks) == 1 for tensor in manifest.tensors.values()), "written once"
    found = set()
    for name in manifest.files:
        with safe_open(str(step_folder(folder, 5) / name), framework="pt") as file:
            found |= set(file.keys())
    assert found == set(manifest.tensors), "the format of the library"
    for ranks in (1, 2, 3, 4):
        on_ranks(ranks, worker("load_step"), {"folder": str(folder), "step": 5, "ranks": 4})


@pytest.mark.slow
def test_sharded_tensors_load_on_another_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    """That room is left: DTensors over 2 ranks go to 1 and to 4."""
    argument = {"folder": str(tmp_path / "checkpoints")}
    on_ranks(2, worker("save_sharded"), argument)
    tensors = read_manifest(step_folder(tmp_path / "checkpoints", 2)).tensors
    counts = {path: len(tensor.chunks) for path, tensor in tensors.items()}
    assert counts == {
        "common/model/rows": 2,
        "common/model/columns": 2,
        "common/model/few": 2,
        "common/model/whole": 1,
    }
    on_ranks(1, worker("load_sharded"), argument)
    on_ranks(4, worker("load_sharded"), argument)
    on_ranks(4, worker("save_sharded"), {"folder": str(tmp_path / "of four")})
    on_ranks(2, worker("load_sharded"), {"folder": str(tmp_path / "of four")})


@pytest.mark.slow
def test_a_job_takes_up_its_own_parts_of_weights_that_other_ranks_split(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    """No rank of either job holds a split weight whole."""
    on_ranks(2, worker("job_of_halves"), {"folder": str(tmp_path), "saves": True})
    on_ranks(3, worker("job_of_halves"), {"folder": str(tmp_path), "saves": False})


def test_states_that_differ_between_ranks_are_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, worker("disagree"), {"folder": str(tmp_path / "checkpoints")})


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_keeps_all_from_committing(
    on_ranks: OnRanks, tmp_path: Path, rank: int
) -> None:
    on_ranks(2, worker("one_rank_fails"), {"folder": str(tmp_path / "checkpoints"), "rank": rank})


def test_a_full_disk_keeps_the_last_good_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    argument = {"folder": str(tmp_path / "disk"), "store": str(tmp_path / "meet")}
    on_ranks(1, worker("on_a_full_disk"), argument)
