"""The examples run as their README says, and show what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT
from launch_host import Host

EXAMPLES = ROOT / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path / "examples"


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = [path.name for path in EXAMPLES.iterdir() if path.name != "README.md"]
    assert files and all(f"`{name}`" in listed for name in files if not name.startswith("__"))


def test_a_loop_of_ones_own_and_the_same_as_a_task(folder: Path, host: Host) -> None:
    """To the same bits: the loop in one process, the task on two ranks."""
    subprocess.run([sys.executable, "own_loop.py"], cwd=folder, check=True)
    words = ("train", "as_task.py", "--bitwise", "--ranks", "2", "--run-dir", "run")
    task = host.launch(folder, *words)
    assert task.wait() == 0, task.err
    one = load_file(folder / "own_loop.safetensors")
    two = load_file(folder / "run" / "weights.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_fine_tuning(folder: Path, host: Host) -> None:
    """The body stays as it was given; the new head learns."""
    first = host.launch(folder, "train", "fine_tuning.py:Pretraining", "--run-dir", "first")
    assert first.wait() == 0, first.err
    words = ("--set", "weights=first/weights.safetensors", "--ranks", "2", "--run-dir", "second")
    second = host.launch(folder, "train", "fine_tuning.py:FineTuning", *words, "--json")
    assert second.wait() == 0, second.err
    assert json.loads(second.out.splitlines()[-1])["eval"]["accuracy"] > 0.8
    one, two = (load_file(folder / name / "weights.safetensors") for name in ("first", "second"))
    assert torch.equal(one["body.0.weight"], two["body.0.weight"])
    assert not torch.equal(one["head.weight"], two["head.weight"])
