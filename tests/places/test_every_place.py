"""The contract of a place, held by each of the table: it refuses purely, foresees,
starts, and ends.

ssh and srun are commands of this test, which start on this machine what they are told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.catalog import BY_HAND, PLACES, load
from allranks.errors import PlaceError, RequestError
from allranks.job.config import resolve
from allranks.job.faults import parse
from allranks.launcher.nodes.cluster import foreseen_hosts, gathered
from allranks.launcher.nodes.join import Ticket
from allranks.launcher.places import (
    AgentPlace,
    NodeRequest,
    Place,
    Rendezvous,
    Started,
    check_request,
    find_place,
    seats_on,
)
from allranks.launcher.places.agents import AGENT, Agents, listen_to_all, ticket_for
from allranks.launcher.plan import Seat
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.start import plan_only, run_job

HERE = Rendezvous(join_timeout_s=60.0)
SSH = """#!/bin/sh
for last in "$@"; do :; done
exec sh -c "$last"
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
ticket=$(cat)
for task in 0 1; do
    echo "$ticket" | SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 SLURM_STEP_ID=0 "$@" &
done
wait
"""
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "one,two",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_END_TIME": "4102444800",
}
STEP = {"SLURM_STEP_NODELIST": "one,two", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
ALL = [*PLACES.values(), BY_HAND]
WITH_NODES = [path for path in ALL if issubclass(load(path), AgentPlace)]


@pytest.fixture
def request_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`request_for(path)`: two nodes with two ranks each there, or two ranks on this machine."""
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=2\n")
    for name, text in (("ssh", SSH), ("srun", SRUN)):
        command = tmp_path / name
        command.write_text(text)
        command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {**SLURM, **STEP}.items():
        monkeypatch.setenv(name, value)
    with Reservation(1) as held:
        by_hand = Rendezvous(endpoint=f"127.0.0.1:{held.ports[0]}", key="of a test", node_rank=0)
        named = {"hosts": replace(HERE, hosts=str(tmp_path / "hosts")), "simulated": Rendezvous()}

        def make(path: str) -> NodeRequest:
            name = load(path).name
            rendezvous = by_hand if path == BY_HAND else named.get(name, HERE)
            nodes = 2 if path in WITH_NODES else 1
            return NodeRequest(name, nodes, 2 * nodes, rendezvous)

        yield make


def place_at(path: str, request: NodeRequest) -> Place:
    place = find_place(request.place, request.rendezvous)
    assert type(place) is load(path)
    return place


@pytest.mark.parametrize("path", ALL)
def test_it_refuses_purely(path: str, request_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a request can be is told from the request alone: nothing is read,
    called or opened."""
    request = request_for(path)
    can_break = place_at(path, request).has_links
    with monkeypatch.context() as nothing:
        for name in ("builtins.open", "socket.socket", "subprocess.Popen", "os.environ"):
            nothing.setattr(name, None)
        check_request(request)
        with pytest.raises(RequestError):
            check_request(replace(request, nodes=5, ranks=3))
        with pytest.raises(RequestError):
            check_request(replace(request, place=f"{request.place}:linc=1gbit"))
        with pytest.raises(RequestError, match="each of which has a node for itself"):
            check_request(replace(request, server_nodes=request.nodes))
        cut = replace(request, broken=parse("cut@node=1,step=2"))
        if can_break:
            check_request(cut)
            cut = replace(request, broken=parse("cut@node=7,step=2"))
        with pytest.raises(RequestError, match="--inject cut@node="):
            check_request(cut)


@pytest.mark.parametrize("path", ALL)
def test_it_foresees_a_seat_for_every_rank(path: str, request_for: Any) -> None:
    """None is foreseen where all ranks are beside each other."""
    request = request_for(path)
    seats = place_at(path, request).seats(request)
    assert [seat.node for seat in seats] == ([0, 0, 1, 1] if path in WITH_NODES else [])
    assert [host.processes for host in foreseen_hosts(seats)] == ([2, 2] if seats else [])
    if seats:
        request = replace(request, server_nodes=1)
        check_request(request)
        apart = place_at(path, request).seats(request)
        assert [seat.node for seat in apart] == [0, 0, 0, 0, 1], "four ranks, and who has none"


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_NODES)
def test_it_starts_an_agent_on_every_node(path: str, request_for: Any) -> None:
    """The fixture `no_leaks` sees to it that none is left."""
    request = request_for(path)
    place = place_at(path, request)
    assert isinstance(place, AgentPlace) and place.advice and place.absent() == ""
    with ExitStack() as stack:
        if path == BY_HAND:
            stack.enter_context(_second_node(request))
        cluster = stack.enter_context(gathered(request))
        assert cluster.counts == {0: 2, 1: 2}
        cluster.server.check_all()
        assert cluster.lost() == ""
        assert (cluster.break_node is not None) == place.has_links


@contextmanager
def _second_node(request: NodeRequest) -> Iterator[None]:
    host, port = request.rendezvous.address
    with Agents() as agents:
        ticket = ticket_for(request, request.rendezvous.key, (host,), port, 1)
        agents.start("node 1", [sys.executable, *AGENT], ticket)
        yield


class Beside(AgentPlace):
    """A place that only this file knows: all its nodes are this machine."""

    name = "beside"
    advice = "look at this test"

    def check(self, request: NodeRequest) -> None:
        if request.device != "cpu":
            raise RequestError(asked="a device", found="it", why="a test", do="leave it out")

    def seats(self, request: NodeRequest) -> list[Seat]:
        return seats_on(request, [f"beside{number}" for number in range(request.nodes)])

    @contextmanager
    def start(self, request: NodeRequest) -> Iterator[Started]:
        with ExitStack() as stack:
            listener, addresses = listen_to_all(stack, request.rendezvous)
            agents = stack.enter_context(Agents())
            names = tuple(f"beside{number}" for number in range(request.nodes))
            for number, name in enumerate(names):
                port = listener.getsockname()[1]
                ticket = ticket_for(request, "a key", addresses, port, number)
                agents.start(name, [sys.executable, *AGENT], ticket)
            yield Started(names, "a key", listener, agents.check, last_words=agents.last_words)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACES, Beside.name, f"{__name__}:Beside")


@pytest.mark.slow
def test_a_new_place_is_a_class_and_a_row(beside: None, server: ForkServer, tmp_path: Path) -> None:
    """It is refused, planned and run as the others, and its result has the bits of one rank."""
    flags: dict[str, Any] = {"bitwise": True, "steps": 3}
    on_nodes = {**flags, "ranks": 2, "nodes": 2, "place": "beside"}
    with pytest.raises(RequestError, match="a device"):
        resolve("digits", {**on_nodes, "device": "cuda"})
    with plan_only(resolve("digits", on_nodes), HERE) as (plan, _):
        assert [rank.host for rank in plan.ranks] == ["beside0", "beside1"]
    there = run_job(
        resolve("digits", {**on_nodes, "run_dir": str(tmp_path / "two")}), rendezvous=HERE
    )
    here = run_job(resolve("digits", {**flags, "run_dir": str(tmp_path / "one")}), server)
    assert there.summary["nodes"] == 2
    assert there.summary["weights_sha256"] == here.summary["weights_sha256"]


def test_the_names_are_those_of_the_table(beside: None) -> None:
    with pytest.raises(RequestError, match="local, hosts, simulated, slurm, beside"):
        find_place("besides")


def test_a_command_that_ends_before_it_reads_its_ticket_is_named() -> None:
    """The ticket is larger than a pipe holds, so the end of the command meets the write."""
    long = Ticket(addresses=(), port=0, key="", node=0, program="p" * 2**20)
    with Agents() as agents:
        agents.start("n9", ["sh", "-c", "exec <&-; exit 7"], long)
        agents._all[0].process.wait()
        with pytest.raises(PlaceError, match=r"n9 could not be started: .* code 7"):
            agents.check()
