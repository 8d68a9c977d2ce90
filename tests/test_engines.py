"""Which engine trains a job, and what is said where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.engines import check_installed, engine_of

KERAS = "from allranks.tensorflow import Task\n"
TORCH = "from allranks.torch import Task\n"
WITHOUT = """
import importlib.abc, sys
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: (
    None if name in ("tensorflow", "keras") else found(name, *more)
)
from allranks.cli.main import main
sys.argv = ["allranks", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("asked", "strategy", "text", "wanted"),
    [
        ("", "", TORCH, "torch"),
        ("", "", KERAS, "tensorflow"),
        ("", "single", KERAS, "tensorflow"),
        ("", "single", TORCH, "torch"),
        ("", "ddp", KERAS, "torch"),
        ("", "mirrored", KERAS, "tensorflow"),
        ("torch", "", KERAS, "torch"),
        ("torch", "single", "import allranks.tensorflow\n", "torch"),
        ("", "", "from allranks import tensorflow\n", "tensorflow"),
        ("", "", "from allranks.training.keras_task import Task\n", "tensorflow"),
        ("", "", "def broken(:\n", "torch"),
        ("", "", "# from allranks.tensorflow import Task\n", "torch"),
    ],
)
def test_who_decides(asked: str, strategy: str, text: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(text)
    for program in (str(path), f"{path}:Mine"):
        assert engine_of(asked, strategy, program) == wanted


def test_a_module_is_looked_up_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = KERAS + "raise AssertionError('it was imported')\n"
    for folder, name in ((tmp_path / "path", "far_tasks"), (tmp_path / "here", "near_tasks")):
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("far_tasks", "near_tasks"):
        assert engine_of("", "", f"{name}:Mine") == "tensorflow"
    for name in ("__main__", "sys", "no_such_module"):
        assert engine_of("", "", f"{name}:Mine") == "torch"


def test_built_in_programs() -> None:
    assert engine_of("", "", "digits") == "torch"
    assert engine_of("", "", "digits-keras") == "tensorflow"
    assert resolve("digits-keras", {"ranks": 2}).job.strategy == "multi-worker-mirrored"
    assert resolve("digits-keras", {"ranks": 2, "engine": "torch"}).job.strategy == "ddp"
    assert resolve("digits", {}).job.engine == "torch"


@pytest.mark.parametrize(
    ("asked", "strategy", "words"),
    [
        ("torch", "mirrored", "'mirrored' is a strategy of tensorflow"),
        ("tensorflow", "ddp", "'ddp' is a strategy of torch"),
        ("jax", "", "no engine 'jax'"),
    ],
)
def test_an_engine_without_the_strategy(asked: str, strategy: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine_of(asked, strategy, "digits-keras")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.job.engines.find_spec", lambda name: None)
    with pytest.raises(RequestError) as refused:
        check_installed("tensorflow", "digits-keras")
    assert "pip install 'allranks[tensorflow]'" in refused.value.do
    with pytest.raises(RequestError) as refused:
        check_installed("torch", "digits-keras")
    assert "pip install 'allranks[keras]'" in refused.value.do
    check_installed("torch", "digits")


@pytest.mark.slow
def test_without_tensorflow_torch_trains_and_keras_is_refused(tmp_path: Path) -> None:
    """In an interpreter that cannot import TensorFlow or Keras."""

    def allranks(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    refused = allranks("train", "digits-keras", "--run-dir", "one")
    assert refused.returncode == 2
    assert "allranks[tensorflow]" in refused.stderr
    assert not (tmp_path / "one").exists()
    done = allranks("train", "digits", "--steps", "1", "--run-dir", "two")
    assert done.returncode == 0, done.stderr
