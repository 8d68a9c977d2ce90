"""Elastic jobs on several nodes: ranks, or a whole node, are lost, and the others go on.

The nodes are simulated on this machine; the digests are those of one process. Tests that break
nodes make some of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.job.config import resolve
from allranks.job.run_folder import read_events, read_rows
from allranks.job.scaling import ANSWERS, ScaleRequest, post
from allranks.launcher.nodes.cluster import Cluster
from allranks.launcher.places import Rendezvous
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import JobWatcher, Result, run_job
from conftest import TASKS
from test_elastic import PROGRAM, STEPS, assert_undisturbed, groups

ON_NODES: dict[str, Any] = {
    "strategy": "ddp",
    "ranks": 4,
    "nodes": 2,
    "place": "simulated:link=1gbit",
    "elastic": "1:4",
    "bitwise": True,
    "steps": STEPS,
    "first_check": "off",
}
SOON = Rendezvous(node_timeout_s=4.0)
PACED = "slow@rank=0,seconds=0.1 slow@rank=2,seconds=0.1"  # the head has seen them begin a step
Elastic = Callable[..., Result]


def in_one_process(server: ForkServer, program: str, folder: Path, steps: int) -> Result:
    """The same training in one process that nobody disturbs."""
    flags = {"strategy": "ddp", "bitwise": True, "steps": steps, "run_dir": str(folder / "alone")}
    return run_job(resolve(program, flags), server)


@pytest.fixture(scope="module")
def alone(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return in_one_process(server, PROGRAM, tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture
def elastic(nodes: Cluster, tmp_path: Path) -> Elastic:
    """`elastic(inject, **flags)`: a job of four ranks on the nodes that all tests share."""

    def run(inject: str, **flags: Any) -> Result:
        flags = {**ON_NODES, "run_dir": str(tmp_path / "run"), "inject": inject, **flags}
        return run_job(resolve(PROGRAM, flags), resources=nodes)

    return run


LOSSES = {
    "of another node": ("kill@rank=3,step=5", [0, 1, 2]),
    "the leader, whose store goes with it": ("kill@rank=0,step=5", [1, 2, 3]),
    "the next leader, while a group forms": (
        "kill@rank=0,step=5 kill@rank=1,at=regroup",
        [2, 3],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_are_lost_on_any_node(elastic: Elastic, alone: Result, name: str) -> None:
    inject, members = LOSSES[name]
    result = elastic(inject)
    assert_undisturbed(result, alone)
    group = groups(result)[-1]
    assert (group["members"], group["step"], group["steps_again"]) == (members, 5, 1)
    for rank in members:
        rows = list(read_rows(result.run_dir / f"pids-{rank}.jsonl"))
        assert [row["step"] for row in rows] == list(range(STEPS))
        assert len({row["pid"] for row in rows}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "node", "members"), [("cut", 1, [0, 1]), ("kill-node", 0, [2, 3])]
)
def test_all_ranks_of_a_lost_node_are_lost_at_once(
    alone: Result, tmp_path: Path, fault: str, node: int, members: list[int]
) -> None:
    """A node whose link is cut ends its ranks itself, before the others go on."""
    inject = f"{fault}@node={node},step=3 {PACED}"
    flags = {**ON_NODES, "run_dir": str(tmp_path / "run"), "inject": inject}
    result = run_job(resolve(PROGRAM, flags), rendezvous=SOON)
    assert_undisturbed(result, alone)
    (group,) = groups(result)
    assert (group["number"], group["members"]) == (1, members)
    lost = [row for row in read_events(result.run_dir) if row["event"] == "worker_lost"]
    assert [row["host"] for row in lost] == [f"node{node}"] * 2
    assert all("no word of it for 4 s" in row["cause"] for row in lost)


@pytest.mark.slow
def test_ranks_leave_and_join_on_nodes(nodes: Cluster, server: ForkServer, tmp_path: Path) -> None:
    """The leader leaves; the new ranks start on the node with free seats, one as the leader."""
    hurry, program = tmp_path / "hurry", str(TASKS / "scale_tasks.py")
    flags = {**ON_NODES, "run_dir": str(tmp_path / "run"), "steps": 300, "elastic": "1:5"}
    commands = [ScaleRequest.new(leave=0), ScaleRequest.new(ranks=5)]
    numbers = [request.number for request in commands]

    def tick() -> None:
        rows = read_rows(tmp_path / "run/events.jsonl")
        done = [row["number"] for row in rows if row["event"] in ANSWERS]
        begun = len(list(read_rows(tmp_path / "run/metrics.jsonl"))) > 3
        if begun and commands and len(done) == len(numbers) - len(commands):
            post(tmp_path / "run", commands.pop(0))
        if len(done) == len(numbers):
            hurry.touch()

    job = resolve(program, flags, (f"hurry={hurry}",))
    result = run_job(job, resources=nodes, watcher=JobWatcher(tick=tick))
    alone = in_one_process(server, program, tmp_path, 300)
    assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert [group["members"] for group in groups(result)] == [[1, 2, 3], [0, 1, 2, 3, 4]]
    joins = [row for row in read_events(result.run_dir) if row["event"] == "joins"]
    assert sorted((row["rank"], row["host"]) for row in joins) == [(0, "node0"), (4, "node0")]
