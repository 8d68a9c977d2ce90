"""The built-in Keras programs on the TensorFlow engine: they learn, here and on nodes, and agree
with the torch engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.start import run_job
from allranks.launcher.supervisor import supervise
from conftest import Train
from tf_runs import difference, events, rows, weights

pytestmark = pytest.mark.slow

JOB: dict[str, Any] = {"strategy": "multi-worker-mirrored", "ranks": 2, "threads": 1}


def test_digits_are_learnt_here_and_on_two_nodes(train_tf: Train, tmp_path: Path) -> None:
    """Equal up to rounding: TensorFlow promises no order of sums. No rank knows where it runs."""
    here = train_tf("digits-keras", "epochs=4", **JOB, precision="fp64")
    assert here.summary["eval"]["accuracy"] >= 0.9
    assert here.summary["engine"] == "tensorflow"
    flags = {**JOB, "precision": "fp64", "place": "simulated:link=1gbit", "nodes": 2}
    flags["run_dir"] = str(tmp_path / "there")
    there = run_job(resolve("digits-keras", flags, ("epochs=4",)))
    losses, theirs = ([row["loss"] for row in rows(run)] for run in (here, there))
    assert theirs == pytest.approx(losses, rel=1e-9) and difference(here, there) < 1e-8
    hosts = {event["host"] for event in events(there, "ready")}
    assert len(hosts) == 2


def test_both_engines_train_one_task_alike(
    train_tf: Train, tf_server: ForkServer, keras_server: ForkServer, tmp_path: Path
) -> None:
    """From the same initial weights, 50 steps of SGD in float64, where only bugs add up."""
    path = str(tmp_path / "start.weights.h5")
    log = tmp_path / "log"
    process = Process(0, "tf_tasks:save_start", {"path": path}, {}, log)
    assert supervise(tf_server, [process]).exits[0].code == 0, log.read_text()
    setting = (f"start={path}", "epochs=100")
    ours = train_tf("tf_tasks:Started", *setting, strategy="single", precision="fp64", steps=50)
    flags = {
        "engine": "torch",
        "strategy": "single",
        "steps": 50,
        "threads": 1,
        "precision": "fp64",
    }
    flags["run_dir"] = str(tmp_path / "torch")
    theirs = run_job(resolve("tf_tasks:Started", flags, setting), keras_server)
    one, other = weights(ours), weights(theirs)
    assert one.keys() == other.keys()
    for name, value in one.items():
        norm = float(np.linalg.norm(other[name]))
        assert float(np.linalg.norm(value - other[name])) <= 1e-8 * norm, name
    pairs = zip(rows(ours), rows(theirs), strict=True)
    assert all(a["loss"] == pytest.approx(b["loss"], rel=1e-8) for a, b in pairs)
    assert ours.summary["eval"]["accuracy"] == theirs.summary["eval"]["accuracy"]
