"""MLflow's files in `mlruns/` of the run folder: one run, with the job as parameters.

Written through MLflow's own client into its file store, which `mlflow ui --backend-store-uri` shows
and `mlflow migrate-filestore` takes into a data base. MLflow still keeps that store, but refuses it
without `MLFLOW_ALLOW_FILE_STORE`, which the leader sets for itself. Steps are counted as in
`tensorboard_log`. A training that goes on makes the folder anew from `metrics.jsonl` and the
events, so that each step is in it once. Numbers are kept for a moment: the store opens a file for
each of them.
"""

from __future__ import annotations

import os
import shutil
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from allranks.checkpoint.folder import FULL
from allranks.job.job import redacted
from allranks.job.run_folder import read_rows
from allranks.training.record.logs import End, counted, evaluations_before

FOLDER = "mlruns"
ALLOW = "MLFLOW_ALLOW_FILE_STORE"
EVERY_S = 5.0
MOST_AT_ONCE = 1000  # of one call, by its own rule
NO_METRICS = ("step", "monotonic")
STATUS: Mapping[End, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowLog:
    """A `Log` that writes one MLflow run."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self._folder = run_dir / FOLDER
        shutil.rmtree(self._folder, ignore_errors=True)
        os.environ.setdefault(ALLOW, "true")
        self._client = MlflowClient(tracking_uri=self._folder.resolve().as_uri())
        job = tomllib.loads((run_dir / "job.toml").read_text())
        program = str(job["program"])
        experiment = self._client.create_experiment(program)
        run = self._client.create_run(experiment, run_name=run_dir.name)
        self._id, self._waiting = str(run.info.run_id), list[Metric]()
        self._written_at = time.monotonic()
        self._error: OSError | None = None
        for name, value in _parameters(job).items():
            self._client.log_param(self._id, name, value)
        for row in read_rows(run_dir / "metrics.jsonl"):
            self.row(row)
        for at, metrics in evaluations_before(run_dir, step).items():
            self.evaluation(at, metrics)

    def row(self, row: Mapping[str, Any]) -> None:
        row = counted(row)
        for name, value in row.items():
            if name not in NO_METRICS and isinstance(value, (int, float)):
                self._add(f"train/{name}", float(value), int(row["step"]))
        if time.monotonic() - self._written_at > EVERY_S:
            self.flush()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._add(f"evaluation/{name}", float(value), step)

    def _add(self, name: str, value: float, step: int) -> None:
        self._waiting.append(Metric(name, value, round(1e3 * time.time()), step))

    def flush(self) -> None:
        """Write what is waiting; after a full disk nothing more is, which `close` says."""
        self._written_at = time.monotonic()
        while self._waiting and self._error is None:
            now, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            try:
                self._client.log_batch(self._id, metrics=now)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._error = OSError(error.errno, error.strerror, str(self._folder))

    def close(self, end: End) -> None:
        self.flush()
        if self._error is not None:
            raise self._error
        self._client.set_terminated(self._id, STATUS[end])


def _parameters(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job and its task by name, `task.lr` for a field; what is not set is left out."""
    task = {f"task.{name}": value for name, value in redacted(job.get("task", {})).items()}
    shown = redacted(dict(job)).items()
    values = {n: v for n, v in shown if n not in ("task", "source", "run_dir")}
    return {name: value for name, value in (values | task).items() if value not in (None, "")}
