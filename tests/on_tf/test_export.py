"""The model of a run as Keras saves it: plain Keras and TensorFlow give the logits it had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.format import step_folder
from allranks.cli.checkpoints import export_model
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise
from conftest import TASKS

pytestmark = pytest.mark.slow

PROGRAM = str(TASKS / "tf_export_tasks.py")
Fork = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """A fork server that has imported TensorFlow."""
    with ForkServer(("tf_export_workers", "allranks.tensorflow.export")) as running:
        yield running


@pytest.fixture
def fork(forks: ForkServer, tmp_path: Path) -> Fork:
    """`fork(name, argument)`: call a function of the workers in a process of its own."""

    def call(name: str, argument: Any) -> None:
        log = tmp_path / "log"
        process = Process(0, f"tf_export_workers:{name}", argument, {}, log)
        code = supervise(forks, [process]).exits[0].code
        assert code == 0, log.read_text()

    return call


def job_of(folder: Path, **task: Any) -> Job:
    made = Job(PROGRAM, task=task, engine="tensorflow", strategy="single", run_dir=str(folder))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return made


def test_plain_keras_and_tensorflow_give_the_same_logits(
    forks: ForkServer, fork: Fork, tmp_path: Path
) -> None:
    """Of a job in float64, with a field that was hidden, and one that is not the default."""
    job = job_of(tmp_path / "run", hidden=4, token="hf_012345678")
    job = dataclasses.replace(job, precision="fp64")
    fork("saves", job.to_data())
    folder = step_folder(tmp_path / "run" / "checkpoints", 3)
    wanted = {"logits": str(tmp_path / "run" / "logits.npy")}
    assert export_model(folder, tmp_path / "m.keras", "keras", forks) == 8
    fork("keras_reads", {"target": str(tmp_path / "m.keras"), **wanted})
    assert export_model(folder, tmp_path / "served", "saved-model", forks) == 8
    fork("serving_reads", {"target": str(tmp_path / "served"), **wanted})
    before = (tmp_path / "m.keras").read_bytes()
    for target, form in (("m.keras", "keras"), ("served", "saved-model"), ("other", "keras")):
        with pytest.raises(RequestError, match=r"is there already|without \.keras"):
            export_model(folder, tmp_path / target, form, forks)
    assert (tmp_path / "m.keras").read_bytes() == before
    changed = dataclasses.replace(job, task={"hidden": 4, "clip_norm": 1.0}, steps=9)
    changes = {"steps": [None, 9], "task.clip_norm": [None, 1.0], "task.token": ["[redacted]", ""]}
    fork("resumes", {"job": changed.to_data(), "changes": changes})


def test_what_keras_cannot_write_leaves_nothing(
    forks: ForkServer, fork: Fork, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "run", broken=True)
    fork("saves", job.to_data())
    folder = step_folder(tmp_path / "run" / "checkpoints", 3)
    before = set(tmp_path.iterdir())
    with pytest.raises(RequestError, match=r"Unsaveable[\s\S]*--format safetensors"):
        export_model(folder, tmp_path / "m.keras", "keras", forks)
    with pytest.raises(RequestError, match="nowhere"):
        export_model(folder, tmp_path / "nowhere" / "m.keras", "keras", forks)
    assert set(tmp_path.iterdir()) == before


def test_names_and_values(fork: Fork) -> None:
    fork("names_of_mirrored_variables", None)
    fork("odd_weights_are_refused", None)
