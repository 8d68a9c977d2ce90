"""`allranks submit -- train` on a real Slurm: to the end, cancelled, requeued, and without a node.

The weights of all that comes to its end are those of one process that nobody disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.folder import committed
from allranks.job.config import resolve
from allranks.job.run_folder import read_events
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job
from slurm_here import SlurmHere

STEPS, LONG = 100, 400
TASKS = Path(__file__).parents[1] / "tasks"
ON_TWO = ("--nodes=2", "--ranks-per-node=2", "--time=10m")


@pytest.fixture(scope="module")
def on_one_rank(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], str]:
    """The SHA-256 of the weights of `digits` after so many steps in one process."""
    found: dict[int, str] = {}

    def digest(steps: int) -> str:
        if steps not in found:
            run_dir = tmp_path_factory.mktemp("one") / "run"
            flags = {"bitwise": True, "steps": steps, "run_dir": str(run_dir)}
            found[steps] = str(run_job(resolve("digits", flags), server).summary["weights_sha256"])
        return found[steps]

    return digest


def submit(
    slurm: SlurmHere,
    *words: str,
    steps: int = STEPS,
    how: tuple[str, ...] = (),
    program: str = "digits",
) -> str:
    """Send a training to two nodes; returns its job."""
    train = ("--", "train", program, "--bitwise", "--steps", str(steps), *words)
    said = slurm.ask("allranks", "submit", *ON_TWO, "--json", "--run-dir=run", *how, *train)
    return str(json.loads(said.splitlines()[-1])["job_id"])


def events(slurm: SlurmHere, name: str) -> list[dict[str, Any]]:
    return [row for row in read_events(slurm.work / "run") if row["event"] == name]


def wait_until_it_trains(slurm: SlurmHere, times: int = 1) -> None:
    """Until so many attempts have made a step."""

    def trains() -> bool:
        return sum(row["rank"] == 0 for row in events(slurm, "training")) >= times

    slurm.wait_for(trains, 120, f"{times} attempts that train")


def wait_for_a_checkpoint(slurm: SlurmHere) -> None:
    folder = slurm.work / "run" / "checkpoints"
    slurm.wait_for(lambda: folder.is_dir() and committed(folder), 120, "a checkpoint")


def summary_of(slurm: SlurmHere) -> dict[str, Any]:
    """The summary of the leader, of the last attempt."""
    return dict([row for row in events(slurm, "done") if row["rank"] == 0][-1]["summary"])


def hosts_of(slurm: SlurmHere) -> set[str]:
    return {row["host"] for row in events(slurm, "ready")}


@pytest.mark.parametrize("how", [(), ("--per-rank",)], ids=["agent per node", "task per rank"])
def test_two_nodes_train_as_one_process_does(
    slurm: SlurmHere, on_one_rank: Callable[[int], str], how: tuple[str, ...]
) -> None:
    job = submit(slurm, how=how)
    slurm.wait_for_state(job, "COMPLETED")
    summary = summary_of(slurm)
    assert (summary["world_size"], summary["nodes"]) == (4, 2)
    assert hosts_of(slurm) == {"n1", "n2"}
    assert summary["eval"]["accuracy"] >= 0.96
    assert summary["weights_sha256"] == on_one_rank(STEPS)
    assert "accuracy" in slurm.output_of(job)
    slurm.wait_until_idle()


def test_following_shows_the_output_and_leaves_as_the_job_does(slurm: SlurmHere) -> None:
    train = ("--", "train", "digits", "--steps", "20", "--inject", "fail@rank=3,step=5")
    done = slurm.run("allranks", "submit", *ON_TWO, "--follow", "--run-dir=run", *train)
    assert done.returncode == 1, done
    assert "rank 3 on n2 failed first at step 5: Injected" in done.stdout + done.stderr


def test_a_cancelled_job_leaves_a_checkpoint_and_no_process(slurm: SlurmHere) -> None:
    job = submit(slurm, steps=1_000_000)
    wait_until_it_trains(slurm)
    slurm.ask("scancel", job)
    slurm.wait_for(lambda: slurm.state_of(job) in ("CANCELLED", "FAILED"), 120, "cancelled")
    slurm.wait_until_idle()
    assert committed(slurm.work / "run" / "checkpoints")
    assert not any(slurm.processes_on(name) for name in ("n1", "n2"))


def test_a_requeue_in_mid_run_ends_with_the_bits_of_an_undisturbed_run(
    slurm: SlurmHere, on_one_rank: Callable[[int], str]
) -> None:
    job = submit(slurm, "--checkpoint-every=20", steps=LONG, how=("--requeue",))
    wait_for_a_checkpoint(slurm)
    slurm.ask("scontrol", "requeue", job)
    slurm.wait_for_state(job, "COMPLETED", timeout_s=240)
    assert len([row for row in events(slurm, "started") if row["rank"] is None]) == 2
    summary = summary_of(slurm)
    assert summary["resumed_from_step"] >= 20
    assert summary["weights_sha256"] == on_one_rank(LONG)


def test_the_signal_before_the_end_saves_and_requeues(
    slurm: SlurmHere, on_one_rank: Callable[[int], str]
) -> None:
    """As Slurm sends it, `--signal` seconds before the time limit."""
    job = submit(slurm, steps=LONG, how=("--requeue", "--signal=60"))
    wait_until_it_trains(slurm)
    slurm.ask("scancel", "--signal=USR1", job)
    slurm.wait_for_state(job, "COMPLETED", timeout_s=240)
    (stopped,) = (row for row in events(slurm, "stopped") if row["rank"] is None)
    assert stopped["reason"] == "SIGUSR1"
    summary = summary_of(slurm)
    assert summary["resumed_from_step"] == stopped["step"] > 0
    assert summary["weights_sha256"] == on_one_rank(LONG)


def test_a_node_that_goes_down_is_named_and_the_job_goes_on(
    slurm: SlurmHere, on_one_rank: Callable[[int], str]
) -> None:
    words = ("--checkpoint-every=20", "--max-restarts=1", "--node-timeout=4")
    job = submit(slurm, *words, steps=LONG)
    wait_for_a_checkpoint(slurm)
    slurm.take_down("n2")
    slurm.wait_for_state(job, "COMPLETED", timeout_s=240)
    (restart,) = events(slurm, "restart")
    assert restart["report"].startswith("node n2 is lost at step ")
    summary = summary_of(slurm)
    assert (summary["world_size"], summary["nodes"]) == (2, 1)
    assert summary["weights_sha256"] == on_one_rank(LONG)
    assert slurm.state_of(job) == "COMPLETED"


def test_two_jobs_at_once_do_not_meet(slurm: SlurmHere) -> None:
    words = ("--nodes=2", "--ranks-per-node=1", "--json")
    jobs = []
    for name in ("a", "b"):
        train = ("--", "train", "digits", "--steps", "30")
        said = slurm.ask("allranks", "submit", *words, f"--run-dir={name}", *train)
        jobs.append(str(json.loads(said.splitlines()[-1])["job_id"]))
    for job in jobs:
        slurm.wait_for_state(job, "COMPLETED")
    for name in ("a", "b"):
        done = [row for row in read_events(slurm.work / name) if row["event"] == "done"]
        summary = next(row["summary"] for row in done if row["rank"] == 0)
        assert (summary["world_size"], summary["steps"]) == (2, 30)


def test_ranks_are_lost_join_and_leave_with_their_node(slurm: SlurmHere, tmp_path: Path) -> None:
    """One dies, another joins in its place, and n2 is emptied by a signal to its agent."""
    (slurm.work / "slow.py").write_text((TASKS / "scale_tasks.py").read_text())
    hurry = slurm.work / "hurry"
    words = (
        "--first-check=off",
        "--elastic=2:4",
        "--inject=kill@rank=1,step=10",
        "--set",
        f"hurry={hurry}",
    )
    job = submit(slurm, *words, program="slow.py", steps=LONG)
    slurm.wait_for(lambda: events(slurm, "group"), 120, "a group without rank 1")
    slurm.wait_for(lambda: events(slurm, "worker_lost"), 60, "the end of rank 1")
    slurm.ask("allranks", "scale", "run", "--ranks", "4", timeout_s=120)
    (agent,) = slurm.agents_on("n2")
    slurm.on_node("n2", "kill", "-TERM", str(agent))
    slurm.wait_for(lambda: not slurm.processes_on("n2"), 60, "n2 empty")
    assert not events(slurm, "done"), "the others train"
    hurry.touch()
    slurm.wait_for_state(job, "COMPLETED", timeout_s=240)
    flags = {"bitwise": True, "steps": LONG, "run_dir": str(tmp_path / "one")}
    alone = run_job(resolve(str(slurm.work / "slow.py"), flags)).summary
    summary = summary_of(slurm)
    assert summary["weights_sha256"] == alone["weights_sha256"]
    rows = [(row["members"], row["steps_again"]) for row in events(slurm, "group")]
    assert rows[1:] == [([0, 1, 2, 3], 0), ([0, 1], 0)] and rows[0][0] == [0, 2, 3]
    assert [row["rank"] for row in events(slurm, "worker_lost")] == [1]
