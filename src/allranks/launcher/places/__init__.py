"""Places: where the ranks of a job run, and how they get there. One file for each place with nodes.

`catalog.PLACES` names the class of each: a new place is a file and a line there. A class states
all that callers need to know of its place, so no caller compares names.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from allranks.catalog import BY_HAND, PLACES, load
from allranks.errors import RequestError
from allranks.job import faults
from allranks.job.job import Job
from allranks.job.place import place_spec
from allranks.launcher.plan import Seat, seats_of, shares
from allranks.launcher.world import launched_by

NAMED = "hosts"


@dataclass(frozen=True)
class Rendezvous:
    """Nodes that a user starts one by one, or hosts reached by ssh; otherwise the place decides.

    It is not part of the job: a job does not depend on how its nodes were found.

    Nodes started one by one connect to `endpoint` ("host:port" of node 0), and all give the name
    of the job as `key`. Without `node_rank`, the node that owns the endpoint's address is node 0;
    the others are numbered as they join. `hosts` is a file of hosts. `interface` is the network
    between the nodes. A node that does not join within `join_timeout_s`, or is silent for
    `node_timeout_s`, is lost. With `per_rank` a scheduler starts one task per rank, not per node.
    """

    node_rank: int | None = None
    endpoint: str = ""
    key: str = ""
    hosts: str = ""
    interface: str = ""
    join_timeout_s: float = 300.0
    node_timeout_s: float = 15.0
    per_rank: bool = False

    @property
    def by_hand(self) -> bool:
        return bool(self.endpoint)

    @property
    def names_nodes(self) -> bool:
        """Whether the user says which nodes, and not the place."""
        return self.by_hand or bool(self.hosts)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class NodeRequest:
    """The nodes of a job. All must have the same `program` and `words`.

    `shared` is a folder that all must see; their fork servers import `modules`. `ranks` are
    distributed over the nodes in order, except for the last `server_nodes`. `broken` are injected
    faults of nodes.
    """

    place: str
    nodes: int
    ranks: int
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    program: str = ""
    words: tuple[str, ...] = ()
    shared: Path | None = None
    modules: tuple[str, ...] = ()
    device: str = "cpu"
    broken: tuple[faults.Fault, ...] = ()
    server_nodes: int = 0


@dataclass(frozen=True)
class Started:
    """Agents that are starting: their names, the key of the job, and the head's socket.

    `check` raises `PlaceError` if an agent cannot join, `watch` if the place has lost its nodes.
    `slots` are the ranks that fit on each node, if known. At `ends_at` (monotonic) the allocation
    ends. `last_words(number)` is the output of a node's agent. `break_node` injects a fault, if
    the place can break nodes. `start_again(number)` starts the agent of a lost node again, if the
    place can.
    """

    names: tuple[str, ...]
    key: str
    listener: socket.socket
    check: Callable[[], None] = lambda: None
    watch: Callable[[], None] = lambda: None
    slots: tuple[int, ...] = ()
    ends_at: float = float("inf")
    last_words: Callable[[int], str] = lambda number: ""
    break_node: Callable[[faults.Fault], None] | None = None
    start_again: Callable[[int], None] | None = None


class Place(ABC):
    """Where ranks run. It has no state: all that depends on the job is in the request.

    `is_default`: the place of a job that names none; nodes that the user names replace it.
    `has_links`: its links are options, and its nodes can be broken on purpose. `lends_nodes`: a
    resumed run may get other nodes. `starts_ranks`: a scheduler can start a task for every rank
    (`--per-rank`).
    """

    name: ClassVar[str]
    is_default: ClassVar[bool] = False
    has_links: ClassVar[bool] = False
    lends_nodes: ClassVar[bool] = False
    starts_ranks: ClassVar[bool] = False

    def check(self, request: NodeRequest) -> None:
        """Raise `RequestError` if this place cannot serve the request. Pure: no file is read."""

    @abstractmethod
    def seats(self, request: NodeRequest) -> list[Seat]:
        """The seat of every rank, as far as it is known before the nodes join.

        The nodes without ranks come last. Empty if all ranks are on this machine.
        """


class ThisMachine(Place):
    """This machine: all ranks are in one fork server, without an agent."""

    name = "local"
    is_default = True

    def check(self, request: NodeRequest) -> None:
        if request.nodes > 1:
            raise RequestError(
                asked=f"--nodes {request.nodes}",
                found=f"--place {self.name}, which is one node",
                why="several nodes must come from somewhere",
                do="--place simulated for nodes on this machine, --place slurm inside of a Slurm "
                "job, --hosts FILE, or --rendezvous on every node",
            )

    def seats(self, request: NodeRequest) -> list[Seat]:
        return []


class AgentPlace(Place):
    """A place with nodes; an agent on each owns the node's ranks.

    Doctor prints `advice` if the nodes do not join.
    """

    advice: ClassVar[str]

    @abstractmethod
    def start(self, request: NodeRequest) -> AbstractContextManager[Started]:
        """Start the agents of all requested nodes; they end with the context.

        Opens the socket at which the head listens. Raises `RequestError` or `PlaceError`.
        """

    def absent(self) -> str:
        """Why this process is not at such a place; "" if it is, or if that is not known."""
        return ""


def find_place(text: str, rendezvous: Rendezvous | None = None) -> Place:
    """The place that a text names; raises `RequestError` for an unknown one."""
    name = place_spec(text).name
    path = BY_HAND if rendezvous is not None and rendezvous.by_hand else PLACES[name]
    place: Place = load(path)()
    return place


def is_head(rendezvous: Rendezvous) -> bool:
    """Whether this is node 0 of nodes started by hand: by `--node-rank`, or as it can listen."""
    if not rendezvous.by_hand or rendezvous.node_rank is not None:
        return not rendezvous.node_rank
    try:
        socket.create_server(rendezvous.address).close()
    except OSError:
        return False
    return True


def check_parts(rendezvous: Rendezvous, nodes: int) -> None:
    """Raise `RequestError` unless its parts fit each other."""
    if rendezvous.node_rank is not None and not rendezvous.by_hand:
        raise RequestError(
            asked=f"--nodes {nodes} --node-rank {rendezvous.node_rank}",
            found="no --rendezvous",
            why="nodes that are started one by one need a place to meet",
            do="--rendezvous HOST:PORT --id NAME, the same on every node",
        )
    if rendezvous.by_hand and rendezvous.hosts:
        raise RequestError(
            asked=f"--hosts {rendezvous.hosts} --rendezvous {rendezvous.endpoint}",
            found="two ways to find the nodes",
            why="with --hosts all nodes are started from here, with --rendezvous each by itself",
            do="give one of them",
        )


def check_job(job: Job) -> None:
    """Raise `RequestError` if the job cannot run at its place. Pure."""
    parsed = faults.parse(job.inject) if job.inject else ()
    broken = tuple(fault for fault in parsed if fault.action in faults.NODE_FAULTS)
    servers, where = job.nodes_apart, (job.place, job.nodes, job.ranks)
    check_request(NodeRequest(*where, device=job.device, broken=broken, server_nodes=servers))


def check_request(request: NodeRequest) -> None:
    """Raise `RequestError` for what no place, or not this one, can do. Pure."""
    place = find_place(request.place, request.rendezvous)
    place.check(request)
    check_server_nodes(request)
    with_ranks = request.nodes - request.server_nodes
    if request.ranks < with_ranks:
        servers = request.server_nodes
        but = f" but {servers}, which servers have for themselves" if servers else ""
        raise RequestError(
            asked=f"--ranks {request.ranks} --nodes {request.nodes}",
            found=f"{request.ranks} ranks, over all nodes{but}",
            why="a node without a rank has nothing to do",
            do=f"--ranks {with_ranks} or more, or fewer nodes",
        )
    for fault in request.broken:
        if not place.has_links or not 0 <= fault.node < request.nodes:
            raise RequestError(
                asked=f"--inject {fault.action}@node={fault.node}",
                found=f"--place {request.place} --nodes {request.nodes}",
                why="only nodes that are simulated can be broken on purpose",
                do="--place simulated --nodes 2, and a node below that number",
            )


def check_server_nodes(request: NodeRequest) -> None:
    """Raise `RequestError` if servers with nodes of their own would leave none for ranks. Pure.

    With `--per-rank` a node without ranks has no agent, so it cannot have a server either.
    """
    if request.server_nodes >= request.nodes:
        raise RequestError(
            asked=f"servers_on=own --nodes {request.nodes}",
            found=f"{request.server_nodes} servers, each of which has a node for itself",
            why="the scheduler and the workers are on other nodes, one at least",
            do=f"--nodes {request.server_nodes + 1} or more, at a place that has nodes (--place "
            "simulated, on this machine), or servers_on=first",
        )
    if request.server_nodes and request.rendezvous.per_rank:
        raise RequestError(
            asked="servers_on=own --per-rank",
            found="a task of Slurm for every rank, and none on a node without a rank",
            why="the agent of a node is what starts its server",
            do="leave --per-rank out, or servers_on=all",
        )


def check_started_once(environment: Mapping[str, str]) -> None:
    """Raise `RequestError` where srun or an mpirun has started this command several times.

    Each of them would run the whole job by itself.
    """
    try:
        launched = launched_by(environment)
    except RequestError:  # variables that disagree: a job of one machine does not read them
        return
    if launched is None or launched.size == 1:
        return
    place = ", with --place slurm for its nodes" if launched.launcher == "srun" else ""
    raise RequestError(
        asked="one job",
        found=f"{launched.launcher} has started {launched.size} of this command; this is number "
        f"{launched.rank}",
        why="allranks starts the ranks itself, so each of them would run the whole job",
        do=f"leave {launched.launcher} out{place}; or start one task with it",
    )


def chosen_place(text: str, rendezvous: Rendezvous, nodes: int) -> str:
    """The place `text`, or that of the nodes which the user names.

    Raises `RequestError` if parts of the rendezvous contradict each other, or the place.
    """
    check_parts(rendezvous, nodes)
    place = find_place(text)
    if rendezvous.names_nodes and not place.is_default:
        raise RequestError(
            asked=f"--place {text} with --rendezvous or --hosts",
            found="a place that knows its nodes",
            why="simulated nodes are made here, and those of Slurm are given by Slurm",
            do="leave --place out, or leave the others out",
        )
    chosen = NAMED if rendezvous.names_nodes else text
    if rendezvous.names_nodes:
        find_place(chosen, rendezvous).check(NodeRequest(chosen, nodes, nodes, rendezvous))
    if not rendezvous.names_nodes:
        check_started_once(os.environ)
    if rendezvous.per_rank and not place.starts_ranks:
        raise RequestError(
            asked=f"--per-rank --place {text}",
            found="no Slurm that would start the ranks",
            why="with it Slurm starts a task for every rank, in place of one for every node",
            do="--place slurm, or leave --per-rank out",
        )
    return chosen


def seats_on(request: NodeRequest, names: Sequence[str], slots: Sequence[int] = ()) -> list[Seat]:
    """A seat for every rank on nodes of these names, each a separate machine."""
    interface = request.rendezvous.interface or "?"
    nodes = [Seat(number, name, interface, number) for number, name in enumerate(names)]
    return shared_out(request, nodes, slots)


def shared_out(
    request: NodeRequest, nodes: Sequence[Seat], slots: Sequence[int] = ()
) -> list[Seat]:
    """A seat for every rank on these nodes, and then one for each node without ranks."""
    counts = shares(request.ranks, request.nodes, slots, request.server_nodes)
    rankless = [node for node, count in zip(nodes, counts, strict=True) if not count]
    return [*seats_of(counts, nodes), *rankless]
