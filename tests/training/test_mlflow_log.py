"""`--log mlflow`: read back with MLflow's own client."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.training.record.logs import check_logs
from conftest import Train
from launch_host import Host


@pytest.mark.slow
def test_a_run_in_mlflow_has_each_step_once(train: Train, tmp_path: Path) -> None:
    """Also one that goes on after its checkpoint; the job is in it as parameters."""
    from mlflow.tracking import MlflowClient  # noqa: PLC0415  not in every environment

    run_dir = str(tmp_path / "run")
    flags: dict[str, Any] = {"run_dir": run_dir, "log": "mlflow", "eval_every": "4"}
    train("digits", "lr=0.003", **flags, ranks=2, steps=8, checkpoint_every=4)
    train("", run_dir=run_dir, steps=12)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    try:
        client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
        (experiment,) = (e for e in client.search_experiments() if e.name == "digits")
        (run,) = client.search_runs([experiment.experiment_id])
        losses = client.get_metric_history(run.info.run_id, "train/loss")
        found = client.get_metric_history(run.info.run_id, "evaluation/accuracy")
    finally:
        del os.environ["MLFLOW_ALLOW_FILE_STORE"]
    assert [metric.step for metric in losses] == list(range(1, 13))
    assert [metric.step for metric in found] == [4, 8, 12]
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert {
        "program": "digits",
        "ranks": "2",
        "task.lr": "0.003",
    }.items() <= run.data.params.items()


@pytest.mark.slow(most=1)
@pytest.mark.parametrize(
    ("status", "words"),
    [("FAILED", ("--inject", "fail@step=10")), ("KILLED", ("--time-limit", "5"))],
)
def test_a_run_in_mlflow_says_how_it_ended(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, words: tuple[str, ...]
) -> None:
    """With each step until then: those of the last seconds had waited in memory."""
    from mlflow.tracking import MlflowClient  # noqa: PLC0415  not in every environment

    asked = ("train", "digits", "--steps", "100000", "--log", "mlflow,csv", "--run-dir", "run")
    launch = host.launch(tmp_path, *asked, *words)
    assert launch.wait() != 0, launch.err
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    (experiment,) = (e for e in client.search_experiments() if e.name == "digits")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert run.info.status == status and run.info.end_time is not None
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    assert [metric.step for metric in losses] == list(range(1, len(rows) + 1)) and rows


@pytest.mark.slow
def test_without_mlflow_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "mlflow" else known(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(RequestError, match=r"pip install 'allranks\[mlflow\]'"):
        check_logs(Job(log="csv,mlflow"))
    check_logs(Job(log="csv"))
