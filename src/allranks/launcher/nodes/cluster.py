"""The nodes of a job, from start to end: started, joined, checked, and released.

`gathered` is the only entry to several nodes, in every place: it starts an agent on each (or waits
for agents that a user starts), and yields a `Cluster`. At its end every node gets the job's exit
code and ends all processes that it owns.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from allranks.errors import EXIT_DONE, EXIT_PROGRAM_FAILED, PlaceError, RequestError
from allranks.job import faults
from allranks.job.faults import MEND
from allranks.job.job import Job
from allranks.job.limits import elastic_range
from allranks.launcher.heartbeat import Beat
from allranks.launcher.nodes.agent import serve
from allranks.launcher.nodes.join import ANY, JoinServer, preflight, refuse
from allranks.launcher.nodes.nodes import Node, Nodes
from allranks.launcher.places import NAMED, AgentPlace, NodeRequest, Rendezvous, Started, find_place
from allranks.launcher.places.agents import ticket_for
from allranks.launcher.plan import (
    LaunchPlan,
    RankPlan,
    Resources,
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

AGAIN_S = 10.0  # between two attempts to start the agent of a lost node again


@dataclass
class Cluster(Resources):
    """Several nodes that have joined.

    A node without ranks runs servers. With `per_rank` each agent has one rank, and a host may have
    several agents. The allocation ends at `ends_at`, on the monotonic clock.
    """

    server: Nodes
    counts: dict[int, int]  # number of a node -> its ranks
    break_node: Callable[[faults.Fault], None] | None = None
    per_rank: bool = False
    ends_at: float = NEVER
    join_server: JoinServer | None = None
    check_back: Callable[..., None] = lambda node, before: None
    """Raises an error for a node that has come back, in place of `before`, and is not as others."""
    start_again: Callable[[int], None] | None = None
    _tries_at: dict[int, float] = field(default_factory=dict)
    _idle: frozenset[int] = frozenset()  # processes that count no steps
    _to_do: list[faults.Fault] = field(default_factory=list)
    _to_mend: list[tuple[float, faults.Fault]] = field(default_factory=list)

    def shared(self, run_dir: Path) -> Path | None:
        return run_dir.parent

    def plan(self, job: Job, shape: Shape) -> LaunchPlan:
        self.server.is_elastic = bool(job.elastic)
        return plan_of(job, shape, Visible.from_environment(), self._take_seats(job))

    def replan(self, plan: LaunchPlan) -> LaunchPlan:
        """Plan for the remaining nodes, with fewer ranks if needed; `PlaceError` if none remain."""
        while True:
            self.server.check_all()
            if not any(self.counts[node.number] for node in self.server.living):
                missing = "node with ranks" if self.server.living else "node"
                raise PlaceError(f"no {missing} is left to go on with\n{self.lost()}".rstrip())
            try:
                return self._planned(plan)
            except PlaceError:
                if not self.server.seats[0].lost:
                    raise

    def _planned(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan for the living nodes, with a socket for the rendezvous of their ranks."""
        self.server.newly_lost()  # a node lost before is not the cause of a later fault
        self._idle = (
            frozenset(range(1, plan.process_set.size))
            if not plan.process_set.are_all_trainers
            else frozenset()
        )
        seats = self._take_seats(plan.job)
        nodes = len({seat.node for seat in seats})
        ranks = sum(self.counts[node.number] for node in self.server.living)
        job = dataclasses.replace(plan.job, ranks=ranks, nodes=nodes)
        if job.elastic and ranks < (least := elastic_range(job)[0]):
            raise PlaceError(
                f"the nodes that are left have {ranks} ranks, and --elastic {job.elastic} goes on "
                f"with {least} at least"
            )
        fewer = dataclasses.replace(plan, job=job)
        if ranks != plan.job.ranks or nodes != plan.job.nodes:
            fewer = plan_of(job, plan.shape, Visible.from_environment(), seats)
        if len(seats) == 1 and not job.elastic:
            return fewer
        return with_rendezvous(fewer, self.server.listen(self.server.seats[0]))

    @property
    def evidence_s(self) -> float:
        """How long to wait for further exits: agents and the network delay their reports."""
        trips = [node.round_trip_s for node in self.server.living if node.measured_at]
        return EVIDENCE_S + 0.3 + 2 * max(trips, default=0.0)

    def lost(self) -> str:
        self.server.check_all()
        return "\n".join(f"node {n.name} is lost: {n.lost}" for n in self.server.newly_lost())

    @contextmanager
    def hosts(self) -> Iterator[tuple[Host, ...]]:
        """The table of the living nodes, each with ports that stay reserved meanwhile."""
        self.server.check_all()
        seats = self._take_seats()
        hosts = []
        for number in range(max(seat.node for seat in seats) + 1 if seats else 0):
            ranks = [rank for rank, seat in enumerate(seats) if seat.node == number]
            node, seat = self.server.seats[ranks[0]], seats[ranks[0]]
            ports = self.server.reserve(node, len(ranks) + 1)
            hosts.append(Host(node.name, node.address, seat.interface, len(ranks), ports))
        if not hosts:
            raise PlaceError("no node is left to go on with")
        yield tuple(hosts)

    def _take_seats(self, job: Job | None = None) -> list[Seat]:
        """A seat for every process on the living nodes; without a job, for the ranks only."""
        living = self.server.living
        counts = [self.counts[node.number] for node in living]
        nodes = [node for count, node in zip(counts, living, strict=True) for _ in range(count)]
        seats = seats_of(counts, [self._seat(node, living) for node in living])
        if job is not None:
            rankless = [node for count, node in zip(counts, living, strict=True) if not count]
            nodes = for_all_processes(job, nodes, rankless)
            seats = for_all_processes(job, seats, [self._seat(node, living) for node in rankless])
        self.server.seats = dict(enumerate(nodes))
        return seats

    def plan_for(
        self, plan: LaunchPlan, ranks: Sequence[int], new: Collection[int]
    ) -> dict[int, RankPlan]:
        """A new rank gets a seat on the node with the most free ones, of those that stay."""
        seats = {rank: self.server.seats[rank] for rank in ranks if rank not in new}
        running = Counter(node.number for node in seats.values())
        staying = [node for node in self.server.living if not node.drain] or self.server.living
        for rank in new:
            free = [self.counts[node.number] - running[node.number] for node in staying]
            seats[rank] = staying[free.index(max(free))]
            running[seats[rank].number] += 1
        job = dataclasses.replace(plan.job, ranks=len(ranks))
        places = [self._seat(seats[rank], self.server.nodes) for rank in ranks]
        planned = plan_of(job, plan.shape, Visible.from_environment(), places)
        planned = with_rendezvous(planned, plan.ranks[0].world.rendezvous)
        self.server.seats |= seats
        return dict(zip(ranks, planned.ranks, strict=True))

    def drained(self) -> tuple[str, frozenset[int]]:
        return self.server.drained()

    def back(self) -> list[tuple[str, int]]:
        """The nodes that have come back since the last call, and for how many ranks each has seats.

        The place tries lost nodes again, where it can, but none that was asked to leave. A node
        that is not as the others, or whose files are not, is refused.
        """
        back, server = list[tuple[str, int]](), self.join_server
        for node in server.admit_again(self.server.nodes) if server is not None else ():
            name, seats = f"node {node.number} ({node.name})", self.counts[node.number]
            before, now = self.server.nodes[node.number], time.monotonic()
            try:
                self.server.take_back(node, partial(self.check_back, before=before))
            except (PlaceError, RequestError, OSError) as error:
                self._tries_at[node.number] = now + AGAIN_S if node.lost else NEVER
                refuse(node, str(error))
                back.append((f"{name} has come back, and is refused: {error}", 0))
            else:
                self._tries_at.pop(node.number, None)
                for_ranks = f"seats for {seats} rank{'s' * (seats != 1)}"
                back.append((f"{name} has come back, with {for_ranks}", seats))
        now, again = time.monotonic(), self.start_again
        for node in self.server.nodes:
            due = self._tries_at.setdefault(node.number, now + AGAIN_S) if node.lost else NEVER
            if again is not None and now >= due and not node.drain:
                self._tries_at[node.number] = now + AGAIN_S
                with suppress(OSError):
                    again(node.number)
        return back

    def _seat(self, node: Node, living: list[Node]) -> Seat:
        """Nodes are numbered by host: with an agent per rank, several agents share one."""
        assert node.chosen is not None, "preflight comes first"
        hosts = list(dict.fromkeys(other.name for other in living)) if self.per_rank else []
        position = hosts.index(node.name) if self.per_rank else living.index(node)
        shared = [(other.facts.machine, other.facts.processors) for other in self.server.nodes]
        machine = shared.index((node.facts.machine, node.facts.processors))
        return Seat(position, node.name, node.chosen.name, machine)

    def inject_due_faults(self, beats: Sequence[Beat]) -> None:
        """Break the nodes whose fault is due, once all ranks have reached its step."""
        step = min((beat.step for beat in beats if beat.rank not in self._idle), default=-1)
        for fault in [fault for fault in self._to_do if step >= fault.step >= 0]:
            self._to_do.remove(fault)
            self._break(fault)
            if fault.action == "cut" and fault.seconds:
                self._to_mend.append((time.monotonic() + fault.seconds, fault))
        for due, fault in [row for row in self._to_mend if time.monotonic() >= row[0]]:
            self._to_mend.remove((due, fault))
            self._break(dataclasses.replace(fault, action=MEND))

    def _break(self, fault: faults.Fault) -> None:
        assert self.break_node is not None, "the place has refused the request"
        self.break_node(fault)

    def plant(self, text: str) -> None:
        """Schedule those injected faults of a job that concern nodes."""
        self._to_do += [fault for fault in faults.parse(text) if fault.action in faults.NODE_FAULTS]


def foreseen_hosts(seats: Sequence[Seat]) -> tuple[Host, ...]:
    """The table of nodes that have not joined: with names as addresses, and made-up ports."""
    hosts: dict[str, Host] = {}
    for seat in seats:
        before = hosts[seat.host].processes if seat.host in hosts else 0
        ports = tuple(range(1, before + 3))
        hosts[seat.host] = Host(seat.host, seat.host, seat.interface, before + 1, ports)
    return tuple(hosts.values())


@contextmanager
def gathered(
    request: NodeRequest, interrupted: Callable[[], None] = lambda: None
) -> Iterator[Cluster]:
    """The requested nodes, joined and checked; they are released at the end.

    `interrupted` is called while nodes join: it raises if the job is to stop. Raises `PlaceError`,
    which names the missing nodes, or the values in which the nodes differ.
    """
    place = find_place(request.place, request.rendezvous)
    assert isinstance(place, AgentPlace), "this machine alone has no nodes"
    with (
        place.start(request) as started,
        _removed_if_empty(request.shared),
        _joined(request, started, interrupted) as (nodes, join_server),
    ):
        preflight(nodes, request.shared, os.getcwd(), request.program)
        interrupted()
        nodes.start_servers(request.modules)
        per_rank = request.rendezvous.per_rank
        counts = shares(request.ranks, request.nodes, started.slots, request.server_nodes)
        counts = (1,) * request.ranks if per_rank else counts
        by_node = dict(enumerate(counts))
        check = partial(preflight, nodes, request.shared, os.getcwd(), request.program)
        parts = started.break_node, per_rank, started.ends_at, join_server, check
        yield Cluster(nodes, by_node, *parts, started.start_again)


@contextmanager
def _joined(
    request: NodeRequest, started: Started, interrupted: Callable[[], None]
) -> Iterator[tuple[Nodes, JoinServer]]:
    """All nodes, once they have joined. At the end they get the exit code, and leave."""
    rendezvous = request.rendezvous

    def check() -> None:
        started.check()
        interrupted()

    expected = started.names, started.key, started.listener, request.words
    server = JoinServer(*expected, rendezvous.join_timeout_s, check)
    nodes = Nodes(
        server.wait_for_all(), rendezvous.node_timeout_s, started.watch, started.last_words
    )
    code, text = EXIT_PROGRAM_FAILED, ""
    try:
        yield nodes, server
        code = EXIT_DONE
    except BaseException as error:
        code, text = getattr(error, "exit_code", EXIT_PROGRAM_FAILED), str(error)
        raise
    finally:
        server.close()
        nodes.leave(code, f"allranks: {text}" if text else "")


@contextmanager
def _removed_if_empty(folder: Path | None) -> Iterator[None]:
    """Remove those parts of this path that are created meanwhile, if they are empty at the end."""
    absent = [] if folder is None else [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        yield
    finally:
        for path in absent:
            with suppress(OSError):  # not empty, or never created
                path.rmdir()


def take_part(rendezvous: Rendezvous, words: tuple[str, ...], program: str = "") -> int:
    """Be a node other than 0 of a job that is started by hand; returns the job's exit code.

    Node 0, which was started with the same command line, sends all commands.
    """
    host, port = rendezvous.address
    request = NodeRequest(NAMED, 1, 1, rendezvous, program, words)
    node = ANY if rendezvous.node_rank is None else rendezvous.node_rank
    ticket = ticket_for(request, rendezvous.key, (host,), port, node)
    return serve(dataclasses.replace(ticket, follows=False))
