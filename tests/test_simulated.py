"""Jobs on simulated nodes: the same bits as on one machine, and faults that name their node.

The fixture `nodes` is two nodes of two ranks, joined by links of 1 Gbit/s; tests that break nodes
make some of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import PlaceError, ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.faults import MEND, Fault
from allranks.job.place import Network
from allranks.job.run_folder import read_events
from allranks.launcher.nodes.cluster import Cluster
from allranks.launcher.nodes.join import Ticket
from allranks.launcher.places import Rendezvous
from allranks.launcher.places.simulated import SimulatedNodes
from allranks.launcher.plan import Shape
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import started_at
from allranks.launcher.processes.process import Process
from allranks.launcher.start import Result, run_job
from allranks.launcher.supervisor import supervise
from allranks.tools.check.against_single import CheckPlan, check_against_one
from launch_host import until

STEPS = 60
NODE_FAULTS: dict[str, Any] = {"ranks": 4, "nodes": 2, "place": "simulated:link=1gbit"}
SOON = Rendezvous(node_timeout_s=8.0)
PACED = "slow@rank=0,seconds=0.1"  # so that there are seconds in which the head hears of a step


@pytest.fixture(scope="module")
def on_one_rank(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of the weights of `digits` after `STEPS` steps in one process."""
    flags = {
        "bitwise": True,
        "steps": STEPS,
        "run_dir": str(tmp_path_factory.mktemp("one") / "run"),
    }
    return str(run_job(resolve("digits", flags), server).summary["weights_sha256"])


@pytest.fixture
def train_on(nodes: Cluster, tmp_path: Path) -> Callable[..., Result]:
    """`train_on(program, **flags)`: a job on the nodes that all tests share."""

    def run(program: str, **flags: Any) -> Result:
        flags = {**NODE_FAULTS, "run_dir": str(tmp_path / "run"), **flags}
        return run_job(resolve(program, flags), resources=nodes)

    return run


def alone(tmp_path: Path, **flags: Any) -> Result:
    """`digits` on two nodes of its own, which may be broken."""
    flags = {**NODE_FAULTS, "bitwise": True, "run_dir": str(tmp_path / "run"), **flags}
    return run_job(resolve("digits", flags), rendezvous=SOON)


@pytest.mark.slow
def test_the_bits_are_those_of_one_rank(
    train_on: Callable[..., Result], on_one_rank: str, tmp_path: Path
) -> None:
    summary = train_on("digits", bitwise=True, steps=STEPS).summary
    assert summary["weights_sha256"] == on_one_rank
    assert (summary["world_size"], summary["nodes"]) == (4, 2)
    assert summary["sent_bytes"]["gradients"] > 0


def test_nodes_are_answered_while_the_head_does_something_else(nodes: Cluster) -> None:
    """A first check trains on the head alone, for longer than agents bear its silence."""
    channels = [node.channel for node in nodes.server.living]
    before = [channel.heard_at for channel in channels]
    with nodes.server.attended():
        until(
            lambda: all(c.heard_at > at for c, at in zip(channels, before, strict=True)),
            "an answer of every node",
        )


def test_an_error_of_the_nodes_ends_what_the_head_does_meanwhile(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def watch() -> None:
        asked.set()
        raise PlaceError("the allocation is over")

    monkeypatch.setattr(nodes.server, "on_idle", watch)
    with pytest.raises(PlaceError, match="the allocation is over"), nodes.server.attended():
        assert asked.wait(60)


def test_nodes_are_hosts_with_a_network_and_names_of_their_own(
    nodes: Cluster, tmp_path: Path
) -> None:
    nodes.replan(nodes.plan(resolve("digits", NODE_FAULTS).job, Shape({}, 256, 8)))
    script = "readlink /proc/self/ns/net; hostname; getent hosts node0 node1; ip -o link"
    processes = [
        Process(rank, "simulated_workers:shell", script, {}, tmp_path / f"{rank}.log")
        for rank in range(4)
    ]
    ended = supervise(nodes.server, processes)
    assert {exit_.code for exit_ in ended.exits.values()} == {0}
    said = [(tmp_path / f"{rank}.log").read_text().splitlines() for rank in range(4)]
    assert [lines[1] for lines in said] == ["node0", "node0", "node1", "node1"]
    assert len({lines[0] for lines in said}) == 2, "a network for each node, not for each rank"
    assert said[0][0] != os.readlink("/proc/self/ns/net")
    assert [line.split()[0] for line in said[3][2:4]] == ["10.77.0.1", "10.77.0.2"]
    assert sum("eth0" in line for line in said[3]) == 1
    assert [ended.exits[rank].host for rank in range(4)] == ["node0", "node0", "node1", "node1"]


def test_the_first_fault_names_its_host(train_on: Callable[..., Result]) -> None:
    with pytest.raises(ProgramError) as failed:
        train_on("digits", steps=STEPS, inject="fail@rank=3,step=5")
    first, *_ = str(failed.value).splitlines()
    assert first.startswith("rank 3 on node1 failed first at step 5: Injected: ")
    assert "Traceback" in str(failed.value) and "stopped because of it: rank 0" in str(failed.value)


@pytest.mark.slow
def test_a_rank_of_another_node_that_hangs_is_named_with_its_stack(
    train_on: Callable[..., Result], tmp_path: Path
) -> None:
    with pytest.raises(ProgramError) as failed:
        train_on("digits", steps=STEPS, inject="hang@rank=2,step=5", hang_timeout=4.0)
    text = str(failed.value)
    assert "rank 2 on node1 is missing: in `compute` of step 5" in text or (
        "rank 2 on node1 is missing: in `data` of step 5" in text
    ), text
    assert "in _hang" in text and re.search(r"rank 0 waits in `exchange` of step 5", text)


@pytest.mark.slow
def test_a_rank_of_another_node_that_is_killed_is_started_again(
    train_on: Callable[..., Result], on_one_rank: str
) -> None:
    inject = "slow@rank=1,seconds=0.1 kill@rank=3,step=25"  # a save takes longer than ten steps
    flags = {"bitwise": True, "steps": STEPS, "checkpoint_every": 10, "max_restarts": 1}
    summary = train_on("digits", **flags, inject=inject).summary
    assert summary["weights_sha256"] == on_one_rank
    assert (summary["restarts"], summary["world_size"]) == (1, 4)
    assert summary["resumed_from_step"] in (10, 20), "that of 20 may not have been committed yet"


def test_a_bad_request_leaves_nothing_on_nodes_either(
    train_on: Callable[..., Result], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="bad_tasks"):
        train_on("bad_tasks:Nowhere")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.cases(
    ("fault", "node", "ranks"), [("cut", 1, "2, 3")], exhaustive=[("kill-node", 0, "0, 1")]
)
def test_without_a_node_the_job_goes_on_with_what_is_left(
    fault: str, node: int, ranks: str, on_one_rank: str, tmp_path: Path
) -> None:
    flags = {"steps": STEPS, "checkpoint_every": 10, "max_restarts": 1}
    inject = f"{fault}@node={node},step=25 {PACED}"
    summary = alone(tmp_path, **flags, inject=inject).summary
    assert summary["weights_sha256"] == on_one_rank
    assert (summary["restarts"], summary["world_size"], summary["nodes"]) == (1, 2, 1)
    (restart,) = (row for row in read_events(tmp_path / "run") if row["event"] == "restart")
    assert restart["report"].startswith(f"node node{node} is lost at step ")
    assert f"with rank {ranks}: no word of it for " in restart["report"]


@pytest.mark.slow
def test_servers_do_without_the_workers_of_a_lost_node(
    train_on: Callable[..., Result], tmp_path: Path
) -> None:
    """The others compute their parts of each batch, to the same bits as if nothing had happened."""
    flags: dict[str, Any] = {"strategy": "ps", "precision": "fp64", "steps": 30}
    whole = train_on("digits", **flags).summary
    paced = "slow@rank=2,seconds=0.1 slow@rank=3,seconds=0.1"
    flags |= {"bitwise": False, "inject": f"kill-node@node=1,step=12 {paced}"}
    summary = alone(tmp_path / "less", **flags).summary
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert (summary["restarts"], summary["world_size"]) == (0, whole["world_size"])
    lost = [row for row in read_events(tmp_path / "less/run") if row["event"] == "worker_lost"]
    assert sorted(row["rank"] for row in lost) == [4, 5]


@pytest.mark.slow
def test_without_restarts_the_report_names_the_node(tmp_path: Path) -> None:
    with pytest.raises(PlaceError) as failed:
        alone(tmp_path, steps=10_000, inject="kill-node@node=0,step=5")
    assert failed.value.exit_code == 3
    assert str(failed.value).startswith("node node0 is lost at step ")
    assert str(failed.value).endswith("stopped because of it: rank 2, 3")


@pytest.mark.slow
def test_a_check_compares_nodes_with_one_process(
    server: ForkServer, nodes: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "allranks.launcher.start.resources_for", lambda *job: contextlib.nullcontext(nodes)
    )
    resolved = resolve("digits", {**NODE_FAULTS, "steps": 3, "precision": "fp64"})
    verdict = check_against_one(resolved, tmp_path, server, CheckPlan((4,), 4, shards=8))
    assert verdict.equal and verdict.looks[0].comparison.steps == 3
    events = read_events(tmp_path / "fp64-4-ranks")
    assert {row["host"] for row in events if row["event"] == "ready"} == {
        "node0",
        "node1",
    }


def test_a_slow_link_is_slow(nodes: Cluster, tmp_path: Path) -> None:
    """All-reduce of 64 MB by 4 ranks: what the busiest link carries, over the time."""
    nodes.replan(nodes.plan(resolve("digits", NODE_FAULTS).job, Shape({}, 256, 8)))
    rate = _all_reduce_rate(nodes, tmp_path)
    least = 0.5  # it is 0.97, where the machine does nothing else
    assert least * 1e9 / 8 <= rate <= 1e9 / 8, f"{rate / 1e6:.1f} MB/s over 1 Gbit/s"


def _all_reduce_rate(nodes: Cluster, folder: Path) -> float:
    first = nodes.server.seats[0]
    address = f"{first.address}:{nodes.server.reserve(first, 1)[0]}"
    processes = [
        Process(
            rank,
            "simulated_workers:all_reduce_64_mb",
            {"rank": rank, "size": 4, "address": address, "folder": str(folder)},
            {"GLOO_SOCKET_IFNAME": "eth0"},
            folder / f"{rank}.log",
        )
        for rank in range(4)
    ]
    ended = supervise(nodes.server, processes)
    logs = "".join((folder / f"{rank}.log").read_text() for rank in range(4))
    assert {exit_.code for exit_ in ended.exits.values()} == {0}, logs
    seconds = float((folder / "seconds").read_text())
    return 2 * 3 / 4 * 64e6 / seconds


# --- what is left -----------------------------------------------------------------------------


@pytest.fixture
def head(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A whole `allranks train` on simulated nodes, in the midst of its training."""
    words = [
        "train",
        "digits",
        "--ranks",
        "2",
        "--nodes",
        "2",
        "--place",
        "simulated",
        "--steps",
        "1000000",
    ]
    command = [sys.executable, "-m", "allranks.cli.main", *words]
    process = subprocess.Popen(
        [*command, "--checkpoint-every", "1000000", "--run-dir", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not any(row["event"] == "training" for row in read_events(tmp_path / "run")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    yield process
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def pids_below(pid: int) -> dict[int, str]:
    """All processes below one, with when each started: a name that nobody has again."""
    done = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = dict(map(int, line.split()) for line in done.stdout.splitlines())
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {one: started_at(one) for one in found}


def assert_gone(processes: dict[int, str]) -> None:
    deadline = time.monotonic() + 60
    while left := {p: t for p, t in processes.items() if t and started_at(p) == t}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_a_head_that_is_killed_leaves_no_process_and_no_network(
    head: subprocess.Popen[bytes],
) -> None:
    below = pids_below(head.pid)
    assert len(below) >= 8, "head, switch, and on each node agent, fork server, rank"
    head.kill()
    head.wait()
    assert_gone(below)


@pytest.mark.slow
def test_a_head_that_is_asked_to_stop_commits_a_checkpoint(
    head: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    below = pids_below(head.pid)
    head.send_signal(signal.SIGTERM)
    assert head.wait(120) == 4
    assert b"which is committed" in head.communicate()[1]
    assert_gone(below)


@pytest.mark.slow
def test_a_node_that_its_scheduler_stops_stops_the_job(
    head: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """As Slurm signals all tasks of a step: the agents pass it on to the head."""
    lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True)
    below = pids_below(head.pid)
    agents = [
        int(x.split()[0]) for x in lines.stdout.splitlines() if "allranks.launcher.nodes.agent" in x
    ]
    for agent in set(agents) & set(below):
        os.kill(agent, signal.SIGUSR1)
    assert head.wait(120) == 4
    assert b"stopped (SIGUSR1) after step" in head.communicate()[1]


def test_a_link_that_is_cut_carries_nothing_and_keeps_its_carrier() -> None:
    """As one that is cut behind a switch: Linux forgets no address of another node."""
    with SimulatedNodes(Network(1)) as made:
        host, port = made.address
        pid = made.start(0, Ticket((host,), port, "a key", 0))

        def inside(*words: str) -> subprocess.CompletedProcess[str]:
            inside_of = ["nsenter", f"--net=/proc/{pid}/ns/net"]
            return subprocess.run([*inside_of, *words], capture_output=True, text=True)

        def reaches_head(seconds: int) -> bool:
            connects = ["bash", "-c", f"</dev/tcp/{host}/{port}"]
            return inside("timeout", str(seconds), *connects).returncode == 0

        assert reaches_head(60)
        made.break_node(Fault("cut", node=0))
        assert not reaches_head(1)
        assert "LOWER_UP" in inside("ip", "link", "show", "eth0").stdout
        assert f"{host} dev eth0 lladdr" in inside("ip", "neigh").stdout
        made.break_node(Fault(MEND, node=0))
        assert reaches_head(60)


def test_closing_ends_nodes_whatever_runs_there() -> None:
    before = pids_below(os.getpid())
    made = SimulatedNodes(Network(1))
    made.start(0, Ticket((made.address[0],), made.address[1], "a key", 0))
    below = pids_below(os.getpid())
    new = {pid: start for pid, start in below.items() if pid not in before}
    assert len(new) >= 2, "the switch and an agent"
    made.close()
    assert_gone(new)
