"""Which engine trains a job, and what is said where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.catalog import ENGINES, STRATEGIES, Engine, Extra
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.engines import (
    check_installed,
    check_program,
    choose_engine,
    is_only_a_task,
    preload_for,
)
from allranks.job.job import Job
from allranks.job.limits import check_engine
from allranks.launcher.start import fields_of
from allranks.strategies.cards import CARDS
from allranks.tools.check.check import check_that_it_traces, checked_in_scratch

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
        assert choose_engine(asked, strategy, program) == wanted


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
        assert choose_engine("", "", f"{name}:Mine") == "tensorflow"
    for name in ("__main__", "sys", "no_such_module"):
        assert choose_engine("", "", f"{name}:Mine") == "torch"


def test_built_in_programs() -> None:
    assert choose_engine("", "", "digits") == "torch"
    assert choose_engine("", "", "digits-keras") == "tensorflow"
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
        choose_engine(asked, strategy, "digits-keras")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.job.engines.find_spec", lambda name: None)
    with pytest.raises(RequestError) as refused:
        check_installed("tensorflow", "digits-keras")
    assert "pip install 'allranks[tensorflow]'" in refused.value.do
    with pytest.raises(RequestError) as refused:
        check_installed("torch", "digits-keras")
    assert "pip install 'allranks[keras]'" in refused.value.do
    check_installed("torch", "digits")


def test_a_check_is_refused_before_keras_is_preloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "with_keras.py"
    path.write_text(KERAS + "class Mine(Task): pass\n")
    resolved = resolve(str(path), {"engine": "torch"})
    monkeypatch.setattr("allranks.job.engines.find_spec", lambda name: None)
    for ask in (
        lambda: checked_in_scratch(resolved, None, explicit=False, bounded=True),
        lambda: fields_of([resolved.job]),
    ):
        with pytest.raises(RequestError) as refused:
            ask()
        assert "pip install 'allranks[keras]'" in refused.value.do


def test_what_takes_long_to_import_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "task.py"

    def large(text: str) -> list[str]:
        task.write_text(TORCH + text)
        return [name for name in preload_for(f"{task}:Mine") if ":" in name]

    models = "from transformers import GPT2Config, AutoModel\n"
    wanted = ["transformers:__name__", "transformers:GPT2Config", "transformers:AutoModel"]
    assert large(models) == [*wanted, "transformers:modeling_utils"]
    assert large("import sklearn.svm, json\n") == ["sklearn:svm"]
    assert large("def later():\n    import transformers\n") == []
    assert large("import os\nos.environ['HF_HOME'] = '/tmp'\n" + models) == []
    (tmp_path / "transformers.py").write_text("")  # ranks import this one
    assert large(models) == []


STUB = Engine(
    name="stub",
    title="Stub",
    worker="stub.worker",
    preload="stub.preload",
    tasks=("stub.tasks",),
    task="a stub task",
    models="models of stub",
    alone="single",
    many="ddp-plain",
    needs=Extra("stubs", ("stub_package",)),
    guests={"tensorflow": Extra("stubs", (), "stub.keras")},
    lacks={"bitwise": "it adds as it likes", "compile": "it has no compiler"},
)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third engine: its row and its strategies, and nothing else."""
    monkeypatch.setitem(ENGINES, "stub", STUB)
    monkeypatch.setitem(STRATEGIES, "stub", dict.fromkeys(("single", "ddp-plain"), "stub:Any"))


@pytest.mark.usefixtures("stub")
def test_a_row_is_an_engine_with_its_own_programs_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("from stub.tasks import Task\nclass Mine(Task): pass\n")
    assert choose_engine("", "", str(path)) == choose_engine("stub", "", "digits") == "stub"
    assert choose_engine("", "ddp", str(path)) == "torch", "a strategy that it does not have"
    assert is_only_a_task(path)
    found = [resolve(str(path), {"ranks": ranks}).job for ranks in (1, 2)]
    assert [(job.engine, job.strategy) for job in found] == [
        ("stub", "single"),
        ("stub", "ddp-plain"),
    ]
    assert Job(engine="stub", ranks=2).strategy_spec.name == "ddp-plain"
    assert CARDS["single"].engines == ("torch", "tensorflow", "stub")
    assert preload_for("digits-keras", "stub")[:3] == ("stub.preload", "stub.worker", "stub.keras")


@pytest.mark.usefixtures("stub")
def test_what_an_engine_of_a_row_cannot_do_is_refused_in_its_name() -> None:
    def refused(wrong: Callable[[], object]) -> RequestError:
        with pytest.raises(RequestError) as error:
            wrong()
        return error.value

    why = refused(lambda: choose_engine("stub", "dp", "digits")).why
    assert why == "the stub engine has single, ddp-plain"
    why = refused(lambda: choose_engine("stob", "", "digits")).why
    assert why.endswith("the arithmetic: torch, tensorflow, stub")
    lacks = refused(lambda: check_engine(Job(engine="stub", bitwise=True)))
    assert lacks.asked == "--bitwise with the Stub engine"
    assert (lacks.why, lacks.do) == ("it adds as it likes", "leave it out")
    lacks = refused(lambda: check_engine(Job(engine="tensorflow", bitwise=True)))
    assert lacks.do == "leave it out, or train a Keras task with --engine torch"
    check_engine(Job(engine="stub", steps_per_call=4))
    missing = refused(lambda: check_installed("stub", "digits"))
    assert (missing.found, missing.do) == (
        "no package stub_package in this Python",
        "pip install 'allranks[stubs]'",
    )
    check_installed("stub", "digits-keras")
    foreign = refused(lambda: check_program("stub", "digits"))
    assert (foreign.found, foreign.do) == (
        "'digits', a program of torch",
        "one of them, or --engine torch",
    )
    check_program("stub", "digits-keras")
    untraced = refused(lambda: check_that_it_traces("stub"))
    assert untraced.asked == "check with the stub engine"


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
