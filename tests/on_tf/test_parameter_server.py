"""Servers, workers, a chief and an evaluator: what each of them gives,
and what their deaths cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.folder import committed
from allranks.checkpoint.format import read_manifest
from allranks.errors import ProgramError, RequestError, Stopped
from allranks.job.config import resolve
from allranks.job.place import read_placements
from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.start import JobWatcher, Result, run_job
from allranks.launcher.supervisor import Signals, supervise
from conftest import TASKS, Train
from tf_runs import difference

pytestmark = pytest.mark.slow

TASK_FILE = str(TASKS / "tf_tasks.py")


@pytest.fixture(scope="module", autouse=True)
def warm(tf_server: ForkServer) -> None:
    """It is there before the first test looks for what it leaves."""


def named(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == name]


def steps_of(result: Result) -> list[int]:
    return [int(row["step"]) for row in read_rows(result.run_dir / "metrics.jsonl")]


# --- what is computed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        ("Convolutions", "parameter-server:servers=2,partition=fixed,in_flight=3"),
        ("Augmented", "parameter-server:in_flight=1"),
    ],
)
def test_one_worker_is_single(train_tf: Train, task: str, strategy: str) -> None:
    """Of arrays that the worker holds, and of samples that the chief sends."""
    flags: dict[str, Any] = {"precision": "fp64", "steps": 20}
    settings = ("optimizer_name=Adam", "lr=0.01") if task == "Convolutions" else ()
    alone = train_tf(f"{TASK_FILE}:{task}", *settings, strategy="single", **flags)
    served = train_tf(f"{TASK_FILE}:{task}", *settings, strategy=strategy, **flags)
    assert difference(served, alone) < 1e-10
    rows = [list(read_rows(one.run_dir / "metrics.jsonl")) for one in (served, alone)]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["samples"] == theirs["samples"]
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
    assert served.summary["eval"] == pytest.approx(alone.summary["eval"], rel=1e-10)


def test_a_worker_that_dies_is_done_without(train_tf: Train) -> None:
    """Two workers and a server learn the digits, though one of them is killed on the way."""
    done = train_tf(
        "digits-keras",
        strategy="parameter-server:evaluator=yes",
        ranks=2,
        steps=120,
        checkpoint_every=40,
        inject="kill@rank=1,step=50 slow@rank=0,seconds=0.02",  # it looks where the chief is
    )
    assert done.summary["eval"]["accuracy"] >= 0.95
    assert done.summary["restarts"] == 0
    assert steps_of(done) == list(range(120)), "each batch of the order, in its order, once"
    (lost,) = named(done.run_dir, "worker_lost")
    assert (lost["rank"], lost["who"], lost["exit"]) == (1, "worker 0 (rank 1)", -9)
    assert "killed by SIGKILL" in lost["cause"]
    evaluated = named(done.run_dir, "evaluated")
    assert {event["rank"] for event in evaluated} == {4}, "only the evaluator does, on the way"
    times = Counter(event["step"] for event in evaluated)
    assert set(times) <= {40, 80, 120} and set(times.values()) == {1}
    last = max(evaluated, key=lambda event: int(event["step"]))
    assert last["step"] == 120, "that of the end is evaluated, though the chief is done"
    assert last["metrics"] == pytest.approx(done.summary["eval"], rel=1e-5)


def test_a_row_that_a_dead_worker_kept_is_made_again(tf_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    target = "tf_served_workers:a_row_that_is_lost_is_made_again"
    ended = supervise(tf_server, [Process(0, target, None, {}, log)])
    assert ended.exits[0].code == 0, log.read_text()


def test_a_server_that_dies_ends_the_attempt_and_the_next_goes_on(train_tf: Train) -> None:
    """With variables that are cut over two servers, of which the checkpoint knows nothing."""
    done = train_tf(
        f"{TASK_FILE}:Dense",
        "optimizer_name=Adam",
        "lr=0.01",
        strategy="parameter-server:servers=2,partition=min-size,part_kb=0.5",
        ranks=1,
        steps=60,
        checkpoint_every=20,
        inject="kill@rank=3,step=45 slow@rank=0,seconds=0.1",  # it looks where the chief is
        max_restarts=1,
    )
    (restart,) = named(done.run_dir, "restart")
    first = restart["report"].splitlines()[0]
    assert first.startswith("server 1 (rank 3) on ") and "failed first at step " in first
    assert restart["first_rank"] == 3 and done.summary["restarts"] == 1
    assert restart["resumes_from"] in (20, 40), "that of 40 may not have been committed yet"
    assert done.summary["resumed_from_step"] == restart["resumes_from"]
    assert steps_of(done) == list(range(60))
    assert done.summary["eval"]["accuracy"] >= 0.9

    (placement,) = read_placements(done.run_dir, 1)
    weights = [row for row in placement.rows if row.kind == "parameter"]
    cut = [row.device for row in weights if row.shape == (18, 16)]
    assert sorted(cut) == ["server 0 cpu:0", "server 1 cpu:0"], "two parts of 36 rows"
    assert Counter(row.shape for row in weights if row.shape != (18, 16)) == {
        (16,): 1,
        (16, 4): 1,
        (4,): 1,
    }, "less than a part has to be is not cut"

    tensors = read_manifest(committed(done.run_dir / "checkpoints")[0]).tensors
    assert not [name for name in tensors if "_part_" in name]
    assert (36, 16) in {tensor.shape for name, tensor in tensors.items() if "momentum" in name}


def test_a_job_without_a_worker_is_over(train_tf: Train, tmp_path: Path) -> None:
    with pytest.raises(ProgramError) as failed:
        train_tf(
            f"{TASK_FILE}:Dense",
            strategy="parameter-server",
            ranks=2,
            steps=100_000,
            inject="kill@rank=1,step=10 kill@rank=2,step=200",
            run_dir=str(tmp_path / "run"),
        )
    report = str(failed.value)
    assert report.startswith("worker 1 (rank 2) on ")
    assert "lost before it: worker 0 (rank 1)" in report
    assert [event["rank"] for event in named(tmp_path / "run", "worker_lost")] == [1]


def test_one_that_is_asked_to_stop_leaves_nothing_under_way(
    tf_server: ForkServer, train_tf: Train, tmp_path: Path
) -> None:
    """What was handed out is done and counted, then saved; who goes on makes each batch once."""
    run_dir = tmp_path / "run"
    flags: dict[str, Any] = {"strategy": "parameter-server:in_flight=4", "ranks": 2, "threads": 1}
    flags["run_dir"] = str(run_dir)
    signals = Signals()

    def tick() -> None:
        if any(int(row["step"]) > 20 for row in read_rows(run_dir / "metrics.jsonl")):
            signals.reason = "SIGTERM"

    resolved = resolve(f"{TASK_FILE}:Dense", {**flags, "steps": 10**6})
    with pytest.raises(Stopped, match="which is committed"):
        run_job(resolved, tf_server, JobWatcher(tick=tick), signals)
    (stopped,) = [event for event in named(run_dir, "stopped") if event["rank"] == 0]
    at = int(stopped["step"])
    assert at > 20 and stopped["checkpoint"]
    done = train_tf(f"{TASK_FILE}:Dense", **flags, steps=at + 20)
    assert done.summary["resumed_from_step"] == at
    assert steps_of(done) == list(range(at + 20))


# --- steps that go wrong --------------------------------------------------------------------


def test_a_step_that_goes_bad_is_skipped_where_it_is(train_tf: Train) -> None:
    done = train_tf(
        f"{TASK_FILE}:Dense",
        strategy="parameter-server",
        ranks=2,
        steps=12,
        on_bad_step="skip",
        inject="nan@rank=0,step=5",
    )
    rows = list(read_rows(done.run_dir / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows if "bad" in row] == [5]
    assert done.summary["steps"] == 11 and len(rows) == 12
    assert done.summary["eval"]["loss"] < 2, "no weight took it over"


def test_what_is_wrong_with_a_task_is_told_as_everywhere(train_tf: Train) -> None:
    with pytest.raises(RequestError, match="it takes no mean"):
        train_tf(f"{TASK_FILE}:Mean", strategy="parameter-server", ranks=2)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flags", "why"),
    [
        ("", {"precision": "fp16"}, "the loss scale of a step follows"),
        ("", {"steps_per_call": 4}, "handed out one by one"),
        (":evaluator=yes", {}, "there would be none"),
    ],
)
def test_what_roles_do_not_go_with(
    train_tf: Train, options: str, flags: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        train_tf("digits-keras", strategy=f"parameter-server{options}", ranks=2, **flags)
