"""`allranks doctor`: examines nodes and measures links; collects, prints nothing.

The nodes join as for a run, but problems that would stop one are noted, not raised, so that all of
them are reported. One probe per rank looks at the folder of runs, and measures the link to each
other rank, one pair at a time so that pairs do not disturb each other. If the nodes do not join,
only this machine is examined.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import EXIT_DONE, EXIT_PLACE_FAILED, PlaceError
from allranks.job.place import LOCAL
from allranks.launcher.nodes.facts import facts
from allranks.launcher.nodes.join import JoinServer, choose_addresses
from allranks.launcher.nodes.nodes import Node, Nodes
from allranks.launcher.places import AgentPlace, NodeRequest, Started, find_place
from allranks.launcher.plan import shares
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Processes
from allranks.tools.doctor.folder import Folder, marked
from allranks.tools.doctor.probes import (
    MODULE,
    MOST_IN_FULL,
    Door,
    Endpoint,
    Lost,
    Probes,
    measure_links,
)
from allranks.tools.doctor.rules import STOP, Diagnosis, Finding, NodeReport, findings


@dataclass
class _Place:
    """Nodes that have joined, their ranks, and the owner of the processes there.

    `doors` are the addresses at which the probes of each node find this process. The nodes leave
    with the exit code `code`.
    """

    processes: Processes
    listener: socket.socket
    key: str
    reports: dict[int, NodeReport]
    node_of: list[int]  # rank -> the number of its node
    doors: dict[int, Door]
    problems: list[Finding] = field(default_factory=list)
    code: int = EXIT_PLACE_FAILED

    def probed(self) -> list[int]:
        """The ranks that get a probe: all of them if they are few, else one on each node.

        On one machine, two are enough to measure the link between its ranks.
        """
        if len(self.node_of) <= MOST_IN_FULL:
            return list(range(len(self.node_of)))
        first = [self.node_of.index(number) for number in dict.fromkeys(self.node_of)]
        return first if len(first) > 1 else [0, 1]

    def ends(self, ranks: Sequence[int]) -> list[Endpoint]:
        """The endpoints of these ranks; empty if a node has no address for the others."""
        reports = [self.reports[self.node_of[rank]] for rank in ranks]
        ends = [
            Endpoint(rank, report.name, report.address)
            for rank, report in zip(ranks, reports, strict=True)
            if report.address is not None
        ]
        return ends if len(ends) == len(ranks) else []


def diagnose(
    request: NodeRequest, folder: Path, tell: Callable[[str], None] = lambda text: None
) -> Diagnosis:
    """Examine the nodes of such a run, and the folder that would hold its run folder.

    `tell` receives lines about slow parts. Raises `RequestError` for an impossible request. No
    process is left.
    """
    target = find_place(request.place, request.rendezvous)
    try:
        if isinstance(target, AgentPlace) and (why := target.absent()):
            raise PlaceError(why)
        with _joined(request) as place:
            diagnosis = _examined(request, folder, place, tell)
            place.code = EXIT_PLACE_FAILED if diagnosis.stops else EXIT_DONE
            return diagnosis
    except PlaceError as error:
        if not isinstance(target, AgentPlace):
            raise
        subject = "the nodes did not come together"
        problem = Finding(STOP, subject, "", str(error), target.advice)
        with _joined(NodeRequest(LOCAL, 1, 1, program=request.program)) as place:
            place.problems.append(problem)
            return _examined(request, folder, place, tell)


def _examined(
    request: NodeRequest, folder: Path, place: _Place, tell: Callable[[str], None]
) -> Diagnosis:
    ranks = place.probed()
    broken: list[str] = []
    with Probes(place.processes, place.listener, place.key) as probes:
        probes.start({rank: place.doors[place.node_of[rank]] for rank in ranks})
        _examine(place, probes, folder)
        matrix = measure_links(probes, place.ends(ranks), broken, tell)
        for rank, why in probes.lost.items():
            number = place.node_of[rank]
            place.reports[number] = dataclasses.replace(place.reports[number], lost=why)
    nodes = tuple(place.reports.values())
    return Diagnosis(
        place=request.place,
        ranks=request.ranks,
        asked_nodes=request.nodes,
        nodes=nodes,
        matrix=matrix,
        findings=(*place.problems, *findings(nodes, broken)),
    )


@contextmanager
def _joined(request: NodeRequest) -> Iterator[_Place]:
    """The requested nodes, or this machine, as the place of a diagnosis."""
    target = find_place(request.place, request.rendezvous)
    if not isinstance(target, AgentPlace):
        with ForkServer((MODULE,)) as server, socket.create_server(("127.0.0.1", 0)) as listener:
            yield _this_machine(request, server, listener)
        return
    with target.start(request) as started:
        timeout_s = request.rendezvous.join_timeout_s
        expected = started.names, started.key, started.listener, request.words
        members = JoinServer(*expected, timeout_s, started.check).wait_for_all()
        nodes = Nodes(members, request.rendezvous.node_timeout_s, started.watch)
        place: _Place | None = None
        try:
            place = _place_of(nodes, request, started)
            yield place
        finally:
            nodes.leave(EXIT_PLACE_FAILED if place is None else place.code)


def _this_machine(request: NodeRequest, server: ForkServer, listener: socket.socket) -> _Place:
    local = facts(request.program)
    report = NodeReport(0, local.host, "127.0.0.1", "lo", local.interfaces, local)
    return _Place(
        processes=server,
        listener=listener,
        key=secrets.token_hex(32),
        reports={0: report},
        node_of=[0] * request.ranks,
        doors={0: Door(*listener.getsockname())},
    )


def _place_of(nodes: Nodes, request: NodeRequest, started: Started) -> _Place:
    """The place of nodes that have just joined; chooses the addresses that connect them."""
    problems = []
    try:
        choose_addresses(nodes)
    except PlaceError as error:
        do = "open the way between the nodes, or name the network that joins them: --interface"
        problems.append(Finding(STOP, "the nodes do not reach each other", "", str(error), do))
    counts = shares(request.ranks, len(nodes.nodes), started.slots)
    seats = [node for node, count in zip(nodes.nodes, counts, strict=True) for _ in range(count)]
    nodes.seats = dict(enumerate(seats))
    nodes.start_servers((MODULE,))
    port = int(started.listener.getsockname()[1])
    return _Place(
        processes=nodes,
        listener=started.listener,
        key=started.key,
        reports={node.number: _report_of(node, nodes.nodes) for node in nodes.nodes},
        node_of=[node.number for node in seats],
        doors={node.number: Door(node.channel.own_address, port) for node in nodes.nodes},
        problems=problems,
    )


def _report_of(node: Node, nodes: Sequence[Node]) -> NodeReport:
    """A node by its host name; with its number if several nodes share the host."""
    many = sum(other.name == node.name for other in nodes) > 1
    return NodeReport(
        number=node.number,
        name=f"{node.name} (node {node.number})" if many else node.name,
        address=None if node.chosen is None else node.chosen.address,
        interface=None if node.chosen is None else node.chosen.name,
        interfaces={interface.name: interface.address for interface in node.interfaces},
        facts=node.facts,
    )


def _examine(place: _Place, probes: Probes, folder: Path) -> None:
    """Note how each node sees the folder of runs, unless its probe is lost."""
    with marked(folder) as mark:
        for number, report in place.reports.items():
            ranks = [rank for rank in place.probed() if place.node_of[rank] == number]
            try:
                answer = probes.ask(ranks[0], {"do": "look", "mark": {**vars(mark)}})
                report = dataclasses.replace(report, folder=Folder(**answer))
            except Lost:
                continue
            place.reports[number] = report
