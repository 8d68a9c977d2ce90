"""Elastic jobs on several nodes: ranks, or a whole node, are lost, and the others go on.

The nodes are simulated on this machine; the digests are those of one process. Tests that break
nodes make some of their own.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from allranks.errors import PeerLost
from allranks.job.config import resolve
from allranks.job.run_folder import read_events, read_rows
from allranks.job.scaling import ANSWERS, ScaleRequest, post
from allranks.launcher.heartbeat import Group, Heartbeat, HeartbeatTable, Stream
from allranks.launcher.nodes.cluster import Cluster
from allranks.launcher.nodes.join import Ticket
from allranks.launcher.nodes.nodes import Node, NodeRanks, Nodes
from allranks.launcher.places import Rendezvous
from allranks.launcher.places.simulated import SimulatedNodes
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Exit
from allranks.launcher.start import JobWatcher, Result, run_job
from allranks.launcher.supervisor import RankWatch, WatchPolicy
from allranks.torch.comm.join import GlancingStore
from conftest import TASKS
from test_elastic import PROGRAM, STEPS, assert_steps_heard, assert_undisturbed, groups

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


def test_agents_show_their_ranks_the_newest_group() -> None:
    """With the address where it meets; an older one that comes late changes nothing."""
    with closing(HeartbeatTable(4, begin=3)) as head, closing(HeartbeatTable(4, begin=0)) as agents:
        agents.put_orders(head.orders)
        rank = Heartbeat(agents.fd, 2)
        assert rank.group() == Group(0, -1, (0, 1, 2))
        head.stores |= {0: "10.0.0.1:4000", 1: "192.168.255.254:65535"}
        first, second = head.form_group([0, 2]), head.form_group([1, 2, 3], 9)
        before = {"wanted": [0.0, 0.0], "group": asdict(first), "stream": asdict(Stream())}
        assert (first.store, second.store) == ("10.0.0.1:4000", "192.168.255.254:65535")
        agents.put_orders(json.loads(json.dumps(head.orders)))
        agents.put_orders(before)
        assert rank.group() == second and rank.has_left(0, 9) and not rank.has_left(0, 8)


def test_a_call_of_a_store_that_does_not_answer_is_left() -> None:
    """Its node is cut off: the rank goes on when the others form a group."""
    released = threading.Event()
    glances = iter([None, None, PeerLost("another group trains")])

    def glance() -> None:
        if (error := next(glances)) is not None:
            raise error

    store = GlancingStore(lambda: SimpleNamespace(check=lambda keys: released.wait()), glance)
    try:
        with pytest.raises(PeerLost, match="another group"):
            store.check(["key"])
    finally:
        released.set()
        store.thread.shutdown()


def test_the_ranks_of_a_lost_node_do_not_count_as_remaining() -> None:
    """Else the first of two is done without, though too few are left with the second."""
    ends = [Exit(ticket, -9, 0.0, lost="no word of it") for ticket in (11, 12)]
    server: Any = SimpleNamespace(exits=lambda seconds: ends, wake=lambda: None)
    seen = list[tuple[int, Collection[int]]]()

    def may_lose(rank: int, remaining: Collection[int]) -> bool:
        seen.append((rank, remaining))
        return True

    watch = RankWatch(server, WatchPolicy(may_lose=may_lose, outlive_nodes=frozenset({1, 2})))
    watch.alive = {10: 0, 11: 1, 12: 2}
    watch.take_exits()
    assert seen == [(1, {0}), (2, {0})] and watch.spared == {1, 2}


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
    assert (group["members"], group["step"]) == (members, 5)
    assert group["steps_again"] <= 1  # none if no other rank had begun the step
    assert_steps_heard(result)


CUTS = {
    "the other half of the nodes": ("cut@node=1,step=3 slow@rank=0,seconds=0.1", 1, [0, 1]),
    "the store, while a group meets there": (
        "kill@rank=3,step=5 cut@node=0,step=5 slow@rank=2,at=regroup,seconds=4",
        0,
        [2],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_a_node_that_is_cut_off_is_lost(alone: Result, tmp_path: Path, name: str) -> None:
    """All its ranks are, in one group; it has ended them itself before the others go on."""
    inject, node, members = CUTS[name]
    flags = {**ON_NODES, "run_dir": str(tmp_path / "run"), "inject": inject}
    result = run_job(resolve(PROGRAM, flags), rendezvous=SOON)
    assert_undisturbed(result, alone)
    assert [row["members"] for row in groups(result)] == [members]
    lost = [row for row in read_events(result.run_dir) if row["event"] == "worker_lost"]
    of_node = [row for row in lost if row["host"] == f"node{node}"]
    assert [row["rank"] for row in of_node] == [2 * node, 2 * node + 1]
    assert all("no word of it for 4 s" in row["cause"] for row in of_node)
    assert all("its processes are ended" in row["cause"] for row in of_node)


@pytest.mark.slow
def test_ranks_leave_and_join_on_nodes(nodes: Cluster, server: ForkServer, tmp_path: Path) -> None:
    """The leader leaves; the new ranks start on the node with free seats, one as the leader."""
    hurry, program = tmp_path / "hurry", str(TASKS / "scale_tasks.py")
    flags = {**ON_NODES, "run_dir": str(tmp_path / "run"), "steps": 300, "elastic": "1:5"}
    commands = [ScaleRequest.new(leave=[0]), ScaleRequest.new(ranks=5)]
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


@pytest.mark.parametrize(
    ("asked", "name", "stops", "ranks"),
    [
        ([1], "SIGTERM", "", {2, 3}),
        ([1, 2], "SIGUSR1", "", {2, 3, 4}),
        ([1, 0], "SIGUSR1", "SIGUSR1", set()),  # to the whole job
        ([1], "SIGINT", "SIGINT", set()),  # a person ends the job
    ],
)
def test_a_signal_to_the_node_of_the_head_is_one_to_the_job(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], name: str, stops: str, ranks: set[int]
) -> None:
    monkeypatch.setattr("allranks.launcher.nodes.nodes.DRAIN_S", 0.0)
    hosts, tickets = (socket.gethostname(), "n1", "n2"), ({0: 0, 1: 1}, {2: 2, 3: 3}, {4: 4})
    messages = list[dict[str, Any]]()
    channel: Any = SimpleNamespace(send=messages.append)
    facts: list[Any] = [SimpleNamespace(host=host) for host in hosts]
    every = [
        Node(number, channel, facts[number], (), (0, ""), (), 0.0, tickets=tickets[number])
        for number in range(3)
    ]
    nodes = Nodes(every, 20.0)
    nodes.is_elastic = True
    with closing(HeartbeatTable(5)) as nodes._heartbeats:
        for number in asked:
            nodes._handle(every[number], {"asked": name})
        assert (nodes.stop_reason(), nodes.drained()[1]) == (stops, ranks)
        assert not messages
        for number in asked:
            every[number].tickets.clear()
        nodes.drained()
        nodes.drained()
    assert [row["code"] for row in messages] == [0] * (0 if stops else len(asked))


def test_the_head_hears_of_a_rank_that_dies_before_its_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, by the ticket of the head, after the last beats."""
    monkeypatch.setattr("allranks.launcher.nodes.nodes.BEATS_S", math.inf)  # else as time passes
    messages, dying = list[dict[str, Any]](), set[int]()
    channel: Any = SimpleNamespace(send=messages.append)
    ranks, facts = NodeRanks(channel), cast("Any", SimpleNamespace(host="n1"))
    ranks.server = cast(
        "Any",
        SimpleNamespace(
            dying=lambda: set(dying), exits=lambda timeout_s: [], started=lambda ticket: True
        ),
    )
    ranks._tickets[7] = 3  # of the head, and of the fork server
    ranks._beats_at = -math.inf
    ranks.report()
    dying.add(3)
    ranks.report()
    ranks.report()
    assert [next(iter(message)) for message in messages] == ["beats", "beats", "dying"]
    node = Node(0, channel, facts, (), (0, ""), (), 0.0, tickets={7: 1})
    nodes = Nodes([node], 20.0)
    for message in messages:
        nodes._handle(node, message)
    assert nodes.dying() == {7}


@pytest.mark.slow
def test_a_node_that_gets_a_signal_leaves(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks end at a step boundary, in one group, then its agent ends; no step is lost."""
    monkeypatch.setattr("allranks.launcher.nodes.nodes.DRAIN_S", 0.3)
    hurry, program, agents = tmp_path / "hurry", str(TASKS / "scale_tasks.py"), list[int]()
    outputs, start = list[Callable[[int], str]](), SimulatedNodes.start

    def noted(self: SimulatedNodes, number: int, ticket: Ticket) -> int:
        agents.append(start(self, number, ticket))
        outputs.append(self.last_words)
        return agents[-1]

    def tick() -> None:
        if len(agents) == 2 and len(list(read_rows(tmp_path / "run/metrics.jsonl"))) > 3:
            os.kill(agents.pop(), signal.SIGTERM)
        if "has left the job, which goes on (SIGTERM)" in outputs[1](1):
            hurry.touch()

    monkeypatch.setattr(SimulatedNodes, "start", noted)
    flags = {**ON_NODES, "run_dir": str(tmp_path / "run"), "steps": 300}
    job = resolve(program, flags, (f"hurry={hurry}",))
    result = run_job(job, watcher=JobWatcher(tick=tick))
    alone = in_one_process(server, program, tmp_path, 300)
    assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
    (group,) = groups(result)
    assert (group["members"], group["steps_again"]) == ([0, 1], 0)
    assert hurry.exists(), "its agent ended while the others trained"
    rows = {row["event"]: row for row in read_events(result.run_dir)}
    assert (rows["scaled"]["by"], rows["scaled"]["left"]) == ("SIGTERM", [2, 3])
    assert "worker_lost" not in rows
