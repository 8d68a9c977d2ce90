"""A job of the TensorFlow engine that is disturbed ends as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.errors import ProgramError, RequestError, Stopped
from allranks.launcher.start import Result
from conftest import Train
from tf_runs import difference, events, rows

pytestmark = pytest.mark.slow

STEPS = 24
JOB: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 5, "keep": 2, "precision": "fp64"}
TOLERANCE = 1e-10
PROGRAM = "tf_tasks:Convolutions"
ADAM = "optimizer_name=AdamW"


@pytest.fixture(scope="module")
def known() -> dict[int, Result]:
    return {}


@pytest.fixture
def undisturbed(train_tf: Train, known: dict[int, Result]) -> Any:
    def run(ranks: int) -> Result:
        if ranks not in known:
            known[ranks] = train_tf(PROGRAM, ADAM, ranks=ranks, **JOB)
        return known[ranks]

    return run


def assert_same(found: Result, wanted: Result) -> None:
    """Every step once, with its loss, and the same weights: no moment, no batch is another one.

    Not compared bit by bit: on a busy machine TensorFlow itself rounds otherwise now and then.
    """
    assert difference(found, wanted) <= TOLERANCE
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=TOLERANCE)
    assert [row["step"] for row in rows(found)] == list(range(STEPS))
    for one, other in zip(rows(found), rows(wanted), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)


@pytest.mark.slow(most=1)
@pytest.mark.cases(
    "inject",
    [
        "kill@rank=1,step=0",
        "kill@rank=0,step=13",
        "kill@rank=0,at=save:rename",
    ],
    exhaustive=[
        *(f"kill@rank={rank},step={step}" for rank in (0, 1) for step in range(1, STEPS, 3)),
        "kill@rank=1,at=evaluate",
        "fail@rank=1,step=7",
        "exit@rank=0,step=9",
    ],
)
def test_a_killed_worker_costs_nothing(inject: str, train_tf: Train, undisturbed: Any) -> None:
    found = train_tf(PROGRAM, ADAM, ranks=2, max_restarts=1, inject=inject, **JOB)
    assert found.summary["restarts"] == 1
    assert_same(found, undisturbed(2))


def test_the_first_fault_is_the_killed_one(train_tf: Train) -> None:
    with pytest.raises(ProgramError, match=r"rank 1.* failed first at step 3: killed by SIGKILL"):
        train_tf(PROGRAM, ranks=2, inject="kill@rank=1,step=3", steps=6)


def test_it_goes_on_in_mid_epoch_on_other_ranks(
    train_tf: Train, undisturbed: Any, tmp_path: Path
) -> None:
    """12 steps on two ranks and the rest in one process, with the data order and all moments."""
    run = str(tmp_path / "run")
    job = {**JOB, "run_dir": run}
    train_tf(PROGRAM, ADAM, ranks=2, **{**job, "steps": 12})
    wanted = undisturbed(1)
    found = train_tf("", ranks=1, strategy="single", **job)
    assert found.summary["resumed_from_step"] == 12
    assert_same(found, wanted)
    (event,) = events(found, "resumed")
    assert event["ranks_were"] == 2
    assert event["changes"]["strategy"] == ["multi-worker-mirrored", "single"]


def test_a_step_that_goes_bad(train_tf: Train) -> None:
    """It names the rank; skipped, nothing is updated,
    and the next step is as if it had not been."""
    with pytest.raises(ProgramError, match=r"came in with rank 1\. Nothing was updated"):
        train_tf(PROGRAM, ranks=2, inject="nan@rank=1,step=2", steps=6)
    skipped = train_tf(PROGRAM, ranks=2, inject="nan@rank=1,step=2", on_bad_step="skip", steps=6)
    assert skipped.summary["steps"] == 5
    assert [bool(row.get("bad")) for row in rows(skipped)] == [n == 2 for n in range(6)]
    assert rows(skipped)[3]["loss"] != "nan"


def test_a_stop_commits_the_step_it_came_in(train_tf: Train, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with pytest.raises(Stopped, match=r"stopped \(time limit\) after step"):
        train_tf(PROGRAM, "epochs=100000", ranks=2, run_dir=run, time_limit=4.0)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


def test_another_job_is_refused(train_tf: Train, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    train_tf(PROGRAM, **{**JOB, "steps": 5, "run_dir": run})
    with pytest.raises(RequestError, match="engine = tensorflow in its job"):
        train_tf("", engine="torch", strategy="single", **{**JOB, "run_dir": run})
    with pytest.raises(RequestError, match="SGD in it, Adam in the task"):
        train_tf("", "optimizer_name=Adam", **{**JOB, "run_dir": run})
