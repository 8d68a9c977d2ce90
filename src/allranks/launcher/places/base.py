"""What a place is: where the ranks of a job run, and how they come there. One file per place.

`catalog.PLACES` names the class of each: a new place is a file and a line there. What a caller has
to know of a place stands on its class, so nobody compares names.
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
from allranks.launcher.nodes.join import Rendezvous, check_parts
from allranks.launcher.plan import Seat, seats_of, shares
from allranks.launcher.scripts.topology import Host
from allranks.launcher.world import launched_by

NAMED = "hosts"


@dataclass(frozen=True)
class NodeRequest:
    """Which nodes, and what for. `program` and `words` are compared between them.

    `shared` is a folder that all must see, `modules` is what their fork servers import. `ranks` are
    shared out over the nodes, in order, but for the last ones, those `apart`. `broken` are the
    faults that are to happen to nodes.
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
    apart: int = 0


@dataclass(frozen=True)
class Started:
    """Agents on their way: what they are called, what they must know, where they come to.

    `check` raises `PlaceError` if one of them will not come, `watch` if what holds the nodes has
    failed. `slots` are the ranks that fit on each node, where that is known. At `ends_at`
    (monotonic) a scheduler takes the nodes away. `said(number)` is what the agent of a node has
    printed. `break_node` makes a fault happen, where nodes can be broken on purpose.
    """

    names: tuple[str, ...]
    key: str
    listener: socket.socket
    check: Callable[[], None] = lambda: None
    watch: Callable[[], None] = lambda: None
    slots: tuple[int, ...] = ()
    ends_at: float = float("inf")
    said: Callable[[int], str] = lambda number: ""
    break_node: Callable[[faults.Fault], None] | None = None


class Place(ABC):
    """Where ranks run. It has no state: all that differs from job to job is in the request.

    `is_default`: the place of a job that names none; it gives way to nodes that the user names.
    `has_links`: its links can be chosen as options, and its nodes broken on purpose. `lends_nodes`:
    a run that is resumed finds other nodes there. `starts_ranks`: a scheduler can start a task for
    every rank (`--per-rank`).
    """

    name: ClassVar[str]
    is_default: ClassVar[bool] = False
    has_links: ClassVar[bool] = False
    lends_nodes: ClassVar[bool] = False
    starts_ranks: ClassVar[bool] = False

    @abstractmethod
    def check(self, request: NodeRequest) -> None:
        """Raise `RequestError` for what cannot be here. It looks at nothing but the request."""

    @abstractmethod
    def seats(self, request: NodeRequest) -> list[Seat]:
        """Where every rank would run, as far as it can be told before the nodes are there.

        Behind them stand the nodes apart. None where all are beside each other on this machine.
        """


class AgentPlace(Place):
    """A place with nodes, on each of which an agent owns the ranks.

    `advice` is what doctor says where the nodes do not come together.
    """

    advice: ClassVar[str]

    @abstractmethod
    def start(self, request: NodeRequest) -> AbstractContextManager[Started]:
        """The agents of all nodes that are asked for; what was started ends with the context.

        It opens the socket at which the head listens. Raises `RequestError` or `PlaceError`.
        """

    def absent(self) -> str:
        """Why there is no such place around this process; "" where that is not known before."""
        return ""


def find_place(text: str, rendezvous: Rendezvous | None = None) -> Place:
    """The place that a text names; raises `RequestError` for one that is not known."""
    name = place_spec(text).name
    path = BY_HAND if rendezvous is not None and rendezvous.by_hand else PLACES[name]
    place: Place = load(path)()
    return place


def check_job(job: Job) -> None:
    """Raise `RequestError` for a job that cannot be where it is to run. Purely."""
    broken = tuple(f for f in faults.parse(job.inject) if f.action in faults.NODE_FAULTS)
    where = job.place, job.nodes, job.ranks
    check_request(NodeRequest(*where, device=job.device, broken=broken, apart=job.nodes_apart))


def check_request(request: NodeRequest) -> None:
    """Raise `RequestError` for what cannot be at any place, or not at this one. Purely."""
    place = find_place(request.place, request.rendezvous)
    place.check(request)
    check_apart(request)
    with_ranks = request.nodes - request.apart
    if request.ranks < with_ranks:
        but = f" but {request.apart}, which servers have for themselves" if request.apart else ""
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


def check_apart(request: NodeRequest) -> None:
    """Raise `RequestError` where what lies on nodes of its own would leave none for ranks. Purely.

    Nor has a node without a rank an agent where a scheduler starts one for every rank.
    """
    if request.apart >= request.nodes:
        raise RequestError(
            asked=f"servers_on=own --nodes {request.nodes}",
            found=f"{request.apart} servers, each of which has a node for itself",
            why="the scheduler and the workers are on other nodes, one at least",
            do=f"--nodes {request.apart + 1} or more, at a place that has nodes (--place "
            "simulated, on this machine), or servers_on=first",
        )
    if request.apart and request.rendezvous.per_rank:
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
    except RequestError:  # variables that do not agree: no job of one machine reads them
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


def chosen_place(asked: str, rendezvous: Rendezvous, nodes: int) -> str:
    """The place that is asked for, or that of the nodes which the user names.

    Raises `RequestError` if the rendezvous does not fit itself, or the place.
    """
    check_parts(rendezvous, nodes)
    place = find_place(asked)
    if rendezvous.names_nodes and not place.is_default:
        raise RequestError(
            asked=f"--place {asked} with --rendezvous or --hosts",
            found="a place that knows its nodes",
            why="simulated nodes are made here, and those of Slurm are given by Slurm",
            do="leave --place out, or leave the others out",
        )
    chosen = NAMED if rendezvous.names_nodes else asked
    if rendezvous.names_nodes:
        find_place(chosen, rendezvous).check(NodeRequest(chosen, nodes, nodes, rendezvous))
    if not rendezvous.names_nodes:
        check_started_once(os.environ)
    if rendezvous.per_rank and not place.starts_ranks:
        raise RequestError(
            asked=f"--per-rank --place {asked}",
            found="no Slurm that would start the ranks",
            why="with it Slurm starts a task for every rank, in place of one for every node",
            do="--place slurm, or leave --per-rank out",
        )
    return chosen


def seats_on(request: NodeRequest, names: Sequence[str], slots: Sequence[int] = ()) -> list[Seat]:
    """A seat for every rank on nodes of these names, each of which is a machine of its own."""
    interface = request.rendezvous.interface or "?"
    nodes = [Seat(number, name, interface, number) for number, name in enumerate(names)]
    return shared_out(request, nodes, slots)


def shared_out(
    request: NodeRequest, nodes: Sequence[Seat], slots: Sequence[int] = ()
) -> list[Seat]:
    """A seat for every rank on these nodes, and behind them each node that has no rank."""
    counts = shares(request.ranks, request.nodes, slots, request.apart)
    apart = [node for node, count in zip(nodes, counts, strict=True) if not count]
    return [*seats_of(counts, nodes), *apart]


def foreseen_hosts(seats: Sequence[Seat]) -> tuple[Host, ...]:
    """The table of nodes that are not there yet: names for addresses, numbers that are no ports."""
    found: dict[str, Host] = {}
    for seat in seats:
        before = found[seat.host].processes if seat.host in found else 0
        ports = tuple(range(1, before + 3))
        found[seat.host] = Host(seat.host, seat.host, seat.interface, before + 1, ports)
    return tuple(found.values())
