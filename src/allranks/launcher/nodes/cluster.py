"""The nodes of a job, from the first call to the last: found, checked, joined, and let go.

`gathered` is the one way to several nodes, whatever the place: it starts an agent on each (or waits
for those that a user starts), and hands out a `Cluster`. When the work in it is over, every node
hears how, and ends all that it owns.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import EXIT_DONE, EXIT_PROGRAM_FAILED, PlaceError
from allranks.job import faults
from allranks.job.faults import MEND
from allranks.job.job import Job
from allranks.launcher.heartbeat import Beat
from allranks.launcher.nodes.agent import serve
from allranks.launcher.nodes.join import ANY, Expected, JoinServer, Rendezvous, Ticket, preflight
from allranks.launcher.nodes.nodes import Node, Nodes
from allranks.launcher.places.base import AgentPlace, NodeRequest, Started, find_place
from allranks.launcher.plan import (
    LaunchPlan,
    Seat,
    Shape,
    for_all_processes,
    plan_of,
    seats_of,
    shares,
    with_rendezvous,
)
from allranks.launcher.scripts.topology import Host
from allranks.launcher.supervisor import EVIDENCE_S, NEVER
from allranks.launcher.world import Visible


@dataclass
class Cluster:
    """Several nodes that have come together. Implements `Resources`.

    A node without ranks has what lies apart. With `per_rank` each agent has one rank, and several
    agents may be on one host. The nodes are taken away at `ends_at`, on the monotonic clock.
    """

    nodes: Nodes
    counts: dict[int, int]  # number of a node -> its ranks
    break_node: Callable[[faults.Fault], None] | None = None
    per_rank: bool = False
    ends_at: float = NEVER
    _idle: frozenset[int] = frozenset()  # processes that are at no step of their own
    _done: set[faults.Fault] = field(default_factory=set)
    _to_do: list[faults.Fault] = field(default_factory=list)
    _to_mend: list[tuple[float, faults.Fault]] = field(default_factory=list)

    @property
    def server(self) -> Nodes:
        return self.nodes

    def shared(self, run_dir: Path) -> Path | None:
        return run_dir.parent

    def plan(self, job: Job, shape: Shape) -> LaunchPlan:
        return plan_of(job, shape, Visible.from_environment(), self._take_seats(job))

    def replan(self, plan: LaunchPlan) -> LaunchPlan:
        """On the nodes that are left, fewer ranks if need be; raises `PlaceError` if none is."""
        while True:
            self.nodes.check_all()
            if not any(self.counts[node.number] for node in self.nodes.living):
                what = "node with ranks" if self.nodes.living else "node"
                raise PlaceError(f"no {what} is left to go on with\n{self.lost()}".rstrip())
            try:
                return self._planned(plan)
            except PlaceError:
                if not self.nodes.seats[0].lost:
                    raise

    def _planned(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan for the nodes that are there, and a socket at which their ranks meet."""
        self.nodes.newly_lost()  # what was lost before is not to blame for what comes
        self._idle = (
            frozenset(range(1, plan.process_set.size))
            if not plan.process_set.are_all_trainers
            else frozenset()
        )
        seats = self._take_seats(plan.job)
        nodes = len({seat.node for seat in seats})
        ranks = sum(self.counts[node.number] for node in self.nodes.living)
        job = dataclasses.replace(plan.job, ranks=ranks, nodes=nodes)
        fewer = dataclasses.replace(plan, job=job)
        if ranks < plan.job.ranks or nodes < plan.job.nodes:
            fewer = plan_of(job, plan.shape, Visible.from_environment(), seats)
        if len(seats) == 1:
            return fewer
        return with_rendezvous(fewer, self.nodes.listen(self.nodes.seats[0]))

    @property
    def evidence_s(self) -> float:
        """Exits come from other nodes when their agents, and the network, have had the time."""
        trips = [node.round_trip_s for node in self.nodes.living if node.measured_at]
        return EVIDENCE_S + 0.3 + 2 * max(trips, default=0.0)

    def lost(self) -> str:
        self.nodes.check_all()
        return "\n".join(f"node {n.name} is lost: {n.lost}" for n in self.nodes.newly_lost())

    @contextmanager
    def hosts(self) -> Iterator[tuple[Host, ...]]:
        """The table of the nodes that are there, each with ports that are its own meanwhile."""
        self.nodes.check_all()
        seats = self._take_seats()
        found = []
        for number in range(max(seat.node for seat in seats) + 1 if seats else 0):
            own = [rank for rank, seat in enumerate(seats) if seat.node == number]
            node, seat = self.nodes.seats[own[0]], seats[own[0]]
            ports = self.nodes.reserve(node, len(own) + 1)
            found.append(Host(node.name, node.address, seat.interface, len(own), ports))
        if not found:
            raise PlaceError("no node is left to go on with")
        yield tuple(found)

    def _take_seats(self, job: Job | None = None) -> list[Seat]:
        """A seat for every process on the nodes that are there; without a job, for the ranks."""
        living = self.nodes.living
        counts = [self.counts[node.number] for node in living]
        nodes = [node for count, node in zip(counts, living, strict=True) for _ in range(count)]
        seats = seats_of(counts, [self._seat(node, living) for node in living])
        if job is not None:
            apart = [node for count, node in zip(counts, living, strict=True) if not count]
            nodes = for_all_processes(job, nodes, apart)
            seats = for_all_processes(job, seats, [self._seat(node, living) for node in apart])
        self.nodes.seats = tuple(nodes)
        return seats

    def _seat(self, node: Node, living: list[Node]) -> Seat:
        """Nodes count by their hosts: with an agent for every rank, several are on one."""
        assert node.chosen is not None, "preflight comes first"
        hosts = list(dict.fromkeys(one.name for one in living)) if self.per_rank else []
        position = hosts.index(node.name) if self.per_rank else living.index(node)
        shared = [(one.facts.machine, one.facts.processors) for one in self.nodes.nodes]
        machine = shared.index((node.facts.machine, node.facts.processors))
        return Seat(position, node.name, node.chosen.name, machine)

    def inject_due_faults(self, beats: Sequence[Beat]) -> None:
        """Break the nodes whose fault is due, once all ranks have come to its step."""
        step = min((beat.step for beat in beats if beat.rank not in self._idle), default=-1)
        for fault in self._to_do:
            if fault not in self._done and step >= fault.step >= 0:
                assert self.break_node is not None, "the place has refused the request"
                self._done.add(fault)
                self.break_node(fault)
                if fault.action == "cut" and fault.seconds:
                    self._to_mend.append((time.monotonic() + fault.seconds, fault))
        for due, fault in list(self._to_mend):
            if self.break_node is not None and time.monotonic() >= due:
                self._to_mend.remove((due, fault))
                self.break_node(dataclasses.replace(fault, action=MEND))

    def plant(self, text: str) -> None:
        """Take those of the faults of a job that happen to nodes."""
        self._to_do += [fault for fault in faults.parse(text) if fault.action in faults.NODE_FAULTS]


@contextmanager
def gathered(
    request: NodeRequest, interrupted: Callable[[], None] = lambda: None
) -> Iterator[Cluster]:
    """The nodes that are asked for, all there and checked; they are let go at the end.

    `interrupted` is called while nodes come together: it raises if somebody wants an end of it.
    Raises `PlaceError` that names who is missing, or in what the nodes differ.
    """
    place = find_place(request.place, request.rendezvous)
    assert isinstance(place, AgentPlace), "this machine alone has no nodes"
    with (
        place.start(request) as started,
        _removed_if_empty(request.shared),
        _joined(request, started, interrupted) as nodes,
    ):
        preflight(nodes, request.shared, os.getcwd(), request.program)
        interrupted()
        nodes.start_servers(request.modules)
        per_rank = request.rendezvous.per_rank
        counts = shares(request.ranks, request.nodes, started.slots, request.apart)
        counts = (1,) * request.ranks if per_rank else counts
        by_node = dict(enumerate(counts))
        yield Cluster(nodes, by_node, started.break_node, per_rank, started.ends_at)


@contextmanager
def _joined(
    request: NodeRequest, started: Started, interrupted: Callable[[], None]
) -> Iterator[Nodes]:
    """All nodes, once they have joined. At the end they hear how it ended, and leave."""
    names, rendezvous = started.names, request.rendezvous
    expected = Expected(names, started.key, request.words, rendezvous.join_timeout_s)

    def check() -> None:
        started.check()
        interrupted()

    found = JoinServer(expected, started.listener, check).wait_for_all()
    nodes = Nodes(found, rendezvous.node_timeout_s, started.watch, started.said)
    code, text = EXIT_PROGRAM_FAILED, ""
    try:
        yield nodes
        code = EXIT_DONE
    except BaseException as error:
        code, text = getattr(error, "exit_code", EXIT_PROGRAM_FAILED), str(error)
        raise
    finally:
        nodes.leave(code, f"allranks: {text}" if text else "")


@contextmanager
def _removed_if_empty(folder: Path | None) -> Iterator[None]:
    """What of this path is made meanwhile is removed at the end, if nothing is in it."""
    made = [] if folder is None else [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):  # something is in it, or it was not made
                path.rmdir()


def is_head(rendezvous: Rendezvous) -> bool:
    """Whether this is node 0 of nodes that are started by hand: it was told so, or may listen."""
    if not rendezvous.by_hand or rendezvous.node_rank is not None:
        return not rendezvous.node_rank
    try:
        socket.create_server(rendezvous.address).close()
    except OSError:
        return False
    return True


def take_part(rendezvous: Rendezvous, words: tuple[str, ...], program: str = "") -> int:
    """Be a node other than 0 of a job that is started by hand; returns the job's exit code.

    Everything else is told by node 0, which was started with the same words.
    """
    host, port = rendezvous.address
    ticket = Ticket(
        addresses=(host,),
        port=port,
        key=rendezvous.key,
        node=ANY if rendezvous.node_rank is None else rendezvous.node_rank,
        words=words,
        program=program,
        interface=rendezvous.interface,
        join_timeout_s=rendezvous.join_timeout_s,
        node_timeout_s=rendezvous.node_timeout_s,
        follows=False,
    )
    return serve(ticket)
