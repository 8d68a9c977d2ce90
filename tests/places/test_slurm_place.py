"""When Slurm takes the nodes away, and when a job stops before that."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.launcher.attempts import Attempts
from allranks.launcher.places import NodeRequest, Rendezvous, chosen_place, slurm
from allranks.launcher.places.agents import AGENT
from allranks.launcher.slurm.allocation import Allocation
from allranks.launcher.supervisor import COMMIT_S

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
SOON_S = 30.0


def allocation(**more: str) -> Allocation:
    found = Allocation.from_environment(JOB | more)
    assert found is not None
    return found


def test_the_end_that_the_job_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "end_time_of", lambda job: pytest.fail("nobody is asked"))
    job = allocation(SLURM_JOB_END_TIME=str(int(time.time()) + 3600))
    assert slurm._end_of(job) - time.monotonic() == pytest.approx(3600, abs=SOON_S)


def test_an_older_slurm_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def end_time_of(job: int) -> float:
        asked.append(job)
        return time.time() + 600

    monkeypatch.setattr(slurm, "end_time_of", end_time_of)
    assert slurm._end_of(allocation()) - time.monotonic() == pytest.approx(600, abs=SOON_S)
    assert asked == [4711]


def test_a_job_without_a_limit_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "end_time_of", lambda job: None)
    assert slurm._end_of(allocation()) == float("inf")


@pytest.mark.parametrize(
    ("limit_s", "left_s", "stops_in_s"),
    [
        (None, None, float("inf")),
        (100.0, None, 100.0),
        (None, 10_000.0, 10_000.0 - COMMIT_S),
        (None, 600.0, 540.0),  # a tenth is kept of a short one
        (5000.0, 600.0, 540.0),
        (50.0, 600.0, 50.0),
    ],
)
def test_a_job_stops_in_time_before_its_nodes_are_taken_away(
    limit_s: float | None, left_s: float | None, stops_in_s: float, tmp_path: Path
) -> None:
    now = time.monotonic()
    resources: Any = SimpleNamespace(ends_at=float("inf") if left_s is None else now + left_s)
    plan: Any = SimpleNamespace(job=SimpleNamespace(time_limit=limit_s))
    nothing: Any = None
    folder: Any = SimpleNamespace(path=tmp_path, events=None)
    attempts = Attempts(resources, plan, folder, nothing, lambda: None, now)
    assert attempts._stop_at() - now == pytest.approx(stops_in_s, abs=SOON_S)


def srun(per_rank: bool, tasks: int, job: Allocation) -> list[str]:
    request = NodeRequest("slurm", 2, 4, Rendezvous(per_rank=per_rank))
    return slurm._srun(job, request, tasks)


def test_the_whole_step_of_an_agent_for_every_node_and_for_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task for every rank keeps the CPUs and the memory that Slurm gave to it;
    an agent has all."""
    monkeypatch.setenv("ALLRANKS_INSIDE", "apptainer exec 'a b.sif'")
    job = allocation(SLURM_TASKS_PER_NODE="2(x2)", SLURM_CPUS_PER_TASK="7")
    first = ["srun", "--nodes=2"]
    always = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--export=ALL", "--unbuffered"]
    last = ["apptainer", "exec", "a b.sif", sys.executable, *AGENT]
    assert srun(True, 4, job) == [
        *(*first, "--ntasks=4", *always, "--distribution=block"),
        *("--cpus-per-task=7", *last),
    ]
    assert srun(False, 2, job) == [
        *(*first, "--ntasks=2", *always, "--distribution=block"),
        *("--ntasks-per-node=1", "--cpu-bind=none", "--mem=0", "--overlap"),
        *("--cpus-per-task=14", *last),
    ]


def test_nodes_of_other_components_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (JOB | {"SLURM_HET_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="component of job 4711, which has 2") as refused:
        slurm._allocation(NodeRequest("slurm", 5, 5))
    assert "not supported" in refused.value.do


@pytest.mark.parametrize(
    "variables",
    [
        {
            **JOB,
            **{"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "1"},
            **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
        },
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_a_job_that_is_started_by_every_task_is_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_place("local", Rendezvous(), 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for place in ("local", "simulated", "slurm"):
        with pytest.raises(RequestError, match="started 2 of this command; this is number 1"):
            chosen_place(place, Rendezvous(), 1)
