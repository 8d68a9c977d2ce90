"""A rate that falls on a plateau: torch's rule, the same on any ranks, exact through a resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

import resume_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import read_rows
from allranks.torch import Trainer
from allranks.training.schedules import Plateau, PlateauState
from conftest import Train


@given(
    values=st.lists(st.sampled_from([0.5, 0.7, 0.699, 0.2, 0.1, math.nan]), max_size=30),
    sign=st.sampled_from(["min", "max"]),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    threshold=st.sampled_from([0.0, 1e-4, 0.3]),
    floor=st.sampled_from([0.0, 0.1]),
)
def test_it_is_torchs_rule(
    values: list[float], sign: Any, patience: int, cooldown: int, threshold: float, floor: float
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torchs = ReduceLROnPlateau(
        *(optimizer, sign, 0.5, patience, threshold), cooldown=cooldown, min_lr=floor, eps=0.0
    )
    rule = Plateau(
        rule=f"{sign}:x",
        factor=0.5,
        patience=patience,
        threshold=threshold,
        cooldown=cooldown,
        floor=floor,
    )
    ours = PlateauState(rule)
    for value in values:
        torchs.step(value)
        again = PlateauState(rule)
        again.load_state(ours.state())
        ours = again
        ours.take({"x": value, "y": 1.0})
        assert ours.factor == optimizer.param_groups[0]["lr"]


def rates_of(run: Path) -> list[float]:
    return [row["learning_rate"] for row in read_rows(run / "metrics.jsonl")]


@pytest.mark.slow
def test_a_plateau_is_the_same_on_any_ranks_and_through_a_resume(
    train: Train, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"bitwise": True, "eval_every": "2", "steps": 20}
    whole = train("resume_tasks:OnPlateau", **flags)
    rates = rates_of(whole.run_dir)
    assert rates[:2] == [0.01, 0.02] and min(rates) <= 0.01 / 4  # it fell, and the schedule goes on
    assert [b / a for a, b in zip(rates[::2], rates[1::2], strict=True)] == [2.0] * 10
    two = train("resume_tasks:OnPlateau", ranks=2, **flags)
    assert two.summary["weights_sha256"] == whole.summary["weights_sha256"]
    half = {**flags, "steps": 11, "checkpoint_every": 11, "run_dir": str(tmp_path / "half")}
    train("resume_tasks:OnPlateau", ranks=3, **half)
    rest = train("resume_tasks:OnPlateau", **{**half, "steps": 20})
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert rates_of(rest.run_dir) == rates


def test_what_cannot_be_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="no --eval-every"):
        train("resume_tasks:OnPlateau", steps=2)
    for wrong in ({"rule": "loss"}, {"factor": 1.0}, {"patience": -1}):
        with pytest.raises(RequestError):
            dataclasses.replace(Plateau(), **wrong)  # type: ignore[arg-type]


def test_a_rate_that_is_set_beside_a_schedule_is_refused() -> None:
    """The engine would overwrite it before the next update, in silence."""
    for task in (resume_tasks.Scheduled(), resume_tasks.OnPlateau()):
        with Trainer(task) as trainer:
            scheduler = ReduceLROnPlateau(trainer.strategy.step.optimizer, patience=0)
            batches = trainer.batches()
            for _ in range(2):
                trainer.step(next(batches))
                scheduler.step(1.0)
            with pytest.raises(RequestError, match="after 2 updates") as raised:
                trainer.step(next(batches))
        assert "plateau()" in raised.value.do


@pytest.mark.slow
def test_a_rate_that_is_set_on_the_way_is_told_once_and_a_state_is_not(tmp_path: Path) -> None:
    told: list[Any] = []

    def report(event: str, **values: Any) -> None:
        told.extend(values["notes"] if event == "rate_notes" else [])

    job = Job(run_dir=str(tmp_path))
    with Trainer(resume_tasks.Rates(), job, report=report) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            trainer.strategy.step.optimizer.param_groups[0]["lr"] *= 0.5
        state = trainer.state()
    (note,) = told
    assert "from 0.01 to 0.005 after 1 update," in note and "plateau()" in note
    with Trainer(resume_tasks.Rates(), job, report=report) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            trainer.load_state(state | {"progress": dataclasses.asdict(trainer.progress)})
    assert len(told) == 1


@pytest.mark.slow
def test_keras_on_tensorflow_has_it_too(train_tf: Train) -> None:
    """The second evaluation, after four steps, is no better; the schedule goes on."""
    flags: dict[str, Any] = {"eval_every": "2", "steps": 6, "ranks": 2}
    run = train_tf("tf_tasks:OnPlateau", **flags)
    factors = [1, 1, 1, 1, 0.5, 0.5]
    wanted = [0.1 * (1 + step / 6) * factor for step, factor in enumerate(factors)]
    assert rates_of(run.run_dir) == pytest.approx(wanted)
    with pytest.raises(RequestError, match="ahead of the evaluations"):
        train_tf("tf_tasks:OnPlateau", **flags, strategy="parameter-server")
