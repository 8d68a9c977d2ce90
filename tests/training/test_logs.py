"""CSV tables and TensorBoard files: read back with the readers they are made for."""

from __future__ import annotations

import csv
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines, keep_rows, rank_events_path, read_rows
from allranks.training.progress import StepResult
from allranks.training.record.logs import (
    STEP_COLUMNS,
    CsvLog,
    End,
    GrowingFile,
    Logs,
    check_logs,
    open_logs,
    row_of,
)
from conftest import Train


def row_at(step: int) -> dict[str, Any]:
    """What is written of a step; step 7 is bad."""
    result = StepResult(
        batch_index=step,
        epoch=step // 10,
        loss=1 / (step + 1),
        samples=32,
        weight=32.0,
        learning_rate=0.1,
        updated=step != 7,
    )
    if step == 7:
        bad = {"bad": 'nan, said\n"rank 1"', "culprits": ((1, "nan"),)}
        result = replace(result, loss=float("nan"), grad_norm=2.5, **bad)
    return {**row_of(result), "monotonic": 100.0 + step}


class Run:
    """The leader of a job as its logs see it:
    attempts that begin at a checkpoint and are killed."""

    def __init__(self, path: Path, log: str = "csv,tensorboard") -> None:
        self.path, self.job = path, Job(run_dir=str(path), log=log)

    def attempt(
        self, start: int, stop: int, saved: tuple[int, ...] = (), ends: bool = True, leader: int = 0
    ) -> None:
        """Make the steps from `start` to `stop`, an evaluation after every third;
        save after some."""
        metrics_path = self.path / "metrics.jsonl"
        keep_rows(metrics_path, lambda row: int(row["step"]) < start)
        with (
            JsonLines(metrics_path) as metrics,
            JsonLines(rank_events_path(self.path, leader)) as events,
        ):
            if leader:
                events.event("group", step=start)
            logs = open_logs(self.job, start)
            for step in range(start, stop):
                metrics.row(row_at(step))
                logs.row(row_at(step))
                if (step + 1) % 3 == 0:
                    found = {"loss": float(step), "accuracy": 0.5}
                    events.event("evaluated", step=step + 1, metrics=found, best=False)
                    logs.evaluation(step + 1, found)
                if step + 1 in saved:
                    metrics.flush()
                    logs.flush()
            logs.close("done") if ends else kill(logs)

    def tables(self) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        with open(self.path / "metrics.csv", newline="") as steps:
            first = list(csv.DictReader(steps))
        with open(self.path / "evaluations.csv", newline="") as evaluations:
            return first, list(csv.DictReader(evaluations))

    def scalars(self) -> dict[str, list[tuple[int, float]]]:
        """What TensorBoard shows of it: (step, value) by tag."""
        reader = EventAccumulator(str(self.path / "tensorboard"), size_guidance={SCALARS: 0})
        reader.Reload()
        tags = reader.Tags()["scalars"]
        return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def kill(logs: Logs) -> None:
    """What is not in the files yet is lost, as with the process."""
    for log in logs._logs:
        files = [log._records._writer] if hasattr(log, "_records") else []
        files += [log._steps.file, log._evaluations.file] if hasattr(log, "_steps") else []
        for file in files:
            file._rest.clear()
            file.close()


def assert_whole(run: Run, steps: int) -> None:
    """Each of `steps` steps, and each evaluation among them, is there once, in order."""
    rows, evaluations = run.tables()
    assert [int(row["step"]) for row in rows] == list(range(1, steps + 1))
    assert [int(row["epoch"]) for row in rows] == [1 + step // 10 for step in range(steps)]
    expected = [(at, name) for at in range(3, steps + 1, 3) for name in ("loss", "accuracy")]
    assert [(int(line["step"]), line["metric"]) for line in evaluations] == expected
    scalars = run.scalars()
    assert scalars["train/epoch"] == [(n, 1.0 + (n - 1) // 10) for n in range(1, steps + 1)]
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, steps + 1))
    losses = scalars.get("evaluation/loss", [])
    assert losses == [(at, float(at - 1)) for at in range(3, steps + 1, 3)]


def test_a_failure_leaves_all_steps_in_the_files(tmp_path: Path) -> None:
    """Of each log, also where another one has trouble of its own."""

    class Broken(CsvLog):
        def close(self, end: End) -> None:
            super().close(end)
            raise ValueError(end)

    good = CsvLog(tmp_path, 0)
    (tmp_path / "other").mkdir()
    logs = Logs([Broken(tmp_path / "other", 0), good])
    logs.row(row_at(0))
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 1, "it is kept for a moment"
    logs.fail()
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 2


def test_a_csv_has_the_columns_of_the_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.attempt(0, 9)
    rows, evaluations = run.tables()
    header = (tmp_path / "metrics.csv").read_text().partition("\n")[0]
    assert header == "step,epoch,loss,samples,learning_rate,monotonic,grad_norm,loss_scale,bad"
    for row, metric in zip(rows, read_rows(tmp_path / "metrics.jsonl"), strict=True):
        as_counted = {**metric, "step": metric["step"] + 1, "epoch": metric["epoch"] + 1}
        assert row == {name: str(as_counted.get(name, "")) for name in STEP_COLUMNS}
    assert rows[7]["bad"] == row_at(7)["bad"] and rows[7]["loss"] == "nan"
    assert evaluations[1] == {"step": "3", "metric": "accuracy", "value": "0.5"}


def test_tensorboard_reads_steps_and_evaluations(tmp_path: Path) -> None:
    run = Run(tmp_path, "tensorboard")
    run.attempt(0, 6)
    scalars = run.scalars()
    assert set(scalars) == {
        *(f"train/{name}" for name in ("epoch", "loss", "samples", "learning_rate")),
        *("evaluation/loss", "evaluation/accuracy"),
    }
    assert scalars["train/loss"] == [(n, pytest.approx(1 / n)) for n in range(1, 7)]
    assert scalars["evaluation/accuracy"] == [(3, 0.5), (6, 0.5)]
    assert not (tmp_path / "metrics.csv").exists(), "what was not asked for"


@settings(max_examples=25)
@given(st.data())
def test_a_run_that_goes_on_has_each_step_once(tmp_path_factory: Any, data: st.DataObject) -> None:
    """However often it was killed, and wherever between two checkpoints."""
    path = tmp_path_factory.mktemp("run")
    run, start = Run(path), 0
    for _ in range(data.draw(st.integers(0, 3))):
        stop = data.draw(st.integers(start, start + 8))
        saved = tuple(sorted(data.draw(st.sets(st.integers(start + 1, start + 9)))))
        run.attempt(start, stop, saved, ends=data.draw(st.booleans()))
        start = max([start, *(step for step in saved if step <= stop)])
    run.attempt(start, start + 4)
    assert_whole(run, start + 4)


def test_evaluations_of_every_leader_are_in_the_files(tmp_path: Path) -> None:
    """Of an elastic job: each leader was lost, and made the last steps again with the next one."""
    run = Run(tmp_path)
    run.attempt(0, 10, saved=(8,), ends=False)
    with JsonLines(rank_events_path(tmp_path, 3)) as evaluator:
        evaluator.event("evaluated", step=4, metrics={"loss": 9.0}, best=False)
    run.attempt(8, 16, saved=(14,), ends=False, leader=2)
    run.attempt(14, 21, leader=1)
    _, evaluations = run.tables()
    steps = [int(line["step"]) for line in evaluations if line["metric"] == "loss"]
    assert steps == [*range(3, 22, 3)]


def test_a_torn_end_is_no_end(tmp_path: Path) -> None:
    """Killed in the midst of a write."""
    run = Run(tmp_path)
    run.attempt(0, 5, saved=(3,))
    (events,) = (tmp_path / "tensorboard").iterdir()
    for path in (events, tmp_path / "metrics.csv"):
        os.truncate(path, path.stat().st_size - 7)
    run.attempt(3, 8)
    assert_whole(run, 8)


def test_no_log_is_asked_for(tmp_path: Path) -> None:
    Run(tmp_path, "").attempt(0, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-0.jsonl", "metrics.jsonl"]


def test_tensorboard_that_is_not_installed_is_found_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_logs(Job(log="csv"))
    with pytest.raises(RequestError) as raised:
        check_logs(Job(log="csv,tensorboard"))
    assert str(raised.value) == (
        "asked: --log csv,tensorboard\n"
        "found: no package tensorboard in this Python\n"
        "why:   its files are written with what defines their format\n"
        "do:    pip install 'allranks[tensorboard]', or leave it out of --log"
    )


def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    """What it does not take is written later; that it took nothing until the end is an error."""
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    file = GrowingFile(path)
    file.write(b"one\n")
    file.flush()
    path.unlink()
    later = GrowingFile(path)
    file._file, later._file = later._file, file._file
    file.write(b"two\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"
    later.write(b"three\n")
    with pytest.raises(OSError, match="No space left"):
        later.close()
    later.close()


@pytest.mark.slow
def test_a_job_writes_what_it_is_asked_for(train: Train) -> None:
    """A real one: two ranks, killed after a checkpoint, started again."""
    result = train(
        "digits",
        ranks=2,
        steps=12,
        log="csv,tensorboard",
        eval_every="5",
        checkpoint_every=4,
        max_restarts=1,
        inject="kill@rank=1,step=6",
    )
    run = Run(result.run_dir)
    rows, evaluations = run.tables()
    metrics = list(read_rows(result.run_dir / "metrics.jsonl"))
    assert [row["loss"] for row in rows] == [str(row["loss"]) for row in metrics]
    assert len(rows) == 12 and {name for row in metrics for name in row} <= set(STEP_COLUMNS)
    scalars = run.scalars()
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, 13))
    values = dict(scalars["evaluation/accuracy"])
    for line in (line for line in evaluations if line["metric"] == "accuracy"):
        assert values.pop(int(line["step"])) == pytest.approx(float(line["value"]))
    assert not values
    assert [line["step"] for line in evaluations][:1] == ["5"]
