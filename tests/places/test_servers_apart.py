"""Servers on nodes of their own: what is planned, refused and run, and a node that is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import PlaceError, RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_events
from allranks.launcher.nodes.cluster import Cluster
from allranks.launcher.places import Rendezvous
from allranks.launcher.start import plan_only, run_job
from conftest import Train
from test_every_strategy import difference

TASK = "decoupled_tasks:Plain"
SOON = Rendezvous(node_timeout_s=8.0)
STEPS = 600  # some seconds: a node is killed in their midst, however late the head hears of a step


def flags_of(servers: int, nodes: int, **more: Any) -> dict[str, Any]:
    strategy = f"ps:servers={servers},bound=8,servers_on=own"
    where = {"ranks": 2, "nodes": nodes, "place": "simulated"}
    return {"strategy": strategy, "precision": "fp64", **where, **more}


def hosts_of(run_dir: Path, attempt: int = 0) -> list[str]:
    """The host of each process, in their order, as they said themselves."""
    rows = [e for e in read_events(run_dir) if e["event"] == "ready" and e["attempt"] == attempt]
    return [str(row["host"]) for row in sorted(rows, key=lambda row: int(row["rank"]))]


@pytest.mark.slow
def test_the_last_nodes_have_a_server_each_and_the_others_the_ranks() -> None:
    with plan_only(resolve(TASK, flags_of(2, 4, ranks=3)), Rendezvous()) as (plan, _):
        hosts = [rank.host for rank in plan.ranks]
        sizes = [rank.world.local_size for rank in plan.ranks]
    assert hosts == ["node0", "node2", "node3", "node0", "node0", "node1"], "scheduler, servers, …"
    assert sizes == [3, 1, 1, 3, 3, 1]


@pytest.mark.parametrize(
    ("flags", "rendezvous", "found"),
    [
        (flags_of(2, 2), Rendezvous(), "2 servers, each of which has a node for itself"),
        (flags_of(1, 1, place="local"), Rendezvous(), "has a node for itself"),
        (flags_of(1, 4), Rendezvous(), "over all nodes but 1"),
        (flags_of(1, 2), Rendezvous(per_rank=True), "leave --per-rank out"),
    ],
    ids=["no node for workers", "one node", "a node for nobody", "an agent per rank"],
)
def test_what_leaves_a_node_without_its_process_is_refused(
    flags: dict[str, Any], rendezvous: Rendezvous, found: str
) -> None:
    with (
        pytest.raises(RequestError, match=found),
        plan_only(resolve(TASK, flags), rendezvous),
    ):
        raise AssertionError("it is planned")


@pytest.mark.slow
def test_a_node_without_ranks_serves_those_of_the_other(
    nodes: Cluster, train: Train, tmp_path: Path
) -> None:
    """The nodes that all tests share: both ranks are on the first, the server is on the second."""
    single = train(TASK, strategy="single", precision="fp64")
    cluster = replace(nodes, counts={0: 2, 1: 0})
    resolved = resolve(TASK, flags_of(1, 2, run_dir=str(tmp_path / "run")))
    done = run_job(resolved, resources=cluster)
    assert hosts_of(done.run_dir) == ["node0", "node1", "node0", "node0"]
    assert done.summary["nodes"] == 2
    weights = [load_file(one.run_dir / "weights.safetensors") for one in (done, single)]
    assert difference(*weights) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "killed", "moved"),
    [
        (2, 1, [["server 0 (rank 1)", "node1", "node2"]]),
        (1, 1, [["server (rank 1)", "node1", "node0"]]),
    ],
    ids=["to the node of another server", "beside the workers, where none is left"],
)
def test_without_a_node_its_server_moves_to_one_that_is_left(
    train: Train, tmp_path: Path, servers: int, killed: int, moved: list[list[str]]
) -> None:
    """From the newest checkpoint, and the end is the same to the bit."""
    how = {"precision": "fp64", "steps": STEPS}
    whole = train(TASK, strategy=f"ps:servers={servers},bound=8", ranks=2, **how)
    more = {"checkpoint_every": 20, "max_restarts": 1, "run_dir": str(tmp_path / "run")}
    inject = f"kill-node@node={killed},step=30"
    flags = flags_of(servers, 1 + servers, inject=inject, steps=STEPS, **more)
    done = run_job(resolve(TASK, flags), rendezvous=SOON)
    told = {row["event"]: row for row in read_events(done.run_dir)}
    assert told["moved"]["processes"] == moved and "fewer_ranks" not in told
    assert told["restart"]["report"].startswith(f"node node{killed} is lost at step ")
    assert moved[0][0] in told["restart"]["report"]
    assert (done.summary["steps"], done.summary["restarts"]) == (STEPS, 1)
    assert done.summary["nodes"] == servers
    found = [load_file(one.run_dir / "weights.safetensors") for one in (whole, done)]
    assert difference(*found) == 0.0


@pytest.mark.slow
def test_servers_alone_are_nothing_to_go_on_with(tmp_path: Path) -> None:
    more = {"steps": 10_000, "max_restarts": 1, "run_dir": str(tmp_path / "run")}
    flags = flags_of(1, 2, inject="kill-node@node=0,step=5", **more)
    with pytest.raises(PlaceError, match="no node with ranks is left"):
        run_job(resolve(TASK, flags), rendezvous=SOON)
