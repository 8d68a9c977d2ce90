"""`allranks doctor`: examines nodes and measures links; collects, prints nothing.

The nodes join as for a run, but problems that would stop one are noted, not raised, so that all of
them are reported. One probe per rank examines its node, returns its time, and measures the link to
each other rank, one pair at a time so that pairs do not disturb each other. If the nodes do not
join, only this machine is examined.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from allranks.errors import EXIT_DONE, EXIT_PLACE_FAILED, PlaceError, RequestError
from allranks.job.place import LOCAL
from allranks.launcher.nodes.facts import Interface, facts, interfaces
from allranks.launcher.nodes.join import Expected, JoinServer, choose_addresses
from allranks.launcher.nodes.nodes import Node, Nodes
from allranks.launcher.places.base import AgentPlace, NodeRequest, find_place
from allranks.launcher.plan import shares
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Processes
from allranks.launcher.slurm.allocation import Allocation
from allranks.tools.doctor.diagnosis import (
    MOST_IN_FULL,
    STOP,
    Diagnosis,
    Endpoint,
    Finding,
    NodeReport,
)
from allranks.tools.doctor.examination import Examination, Mark
from allranks.tools.doctor.findings import Collected, findings, may_differ, must_be_equal
from allranks.tools.doctor.probes import MODULE, Door, Lost, Probes, measure_links

CLOCK_TRIPS = 10
TORCH = re.compile(r"torch(?![\w.-])")
LOOPBACK = Interface("lo", "127.0.0.1")


@dataclass
class _Place:
    """Nodes that have joined, their ranks, and the owner of the processes there."""

    processes: Processes
    listener: socket.socket
    key: str
    reports: dict[int, NodeReport]
    node_of: list[int]  # rank -> the number of its node
    doors: dict[int, Door]  # number of a node -> where its probes find this process
    problems: list[Finding] = field(default_factory=list)
    code: int = EXIT_PLACE_FAILED  # what the nodes leave with


def diagnose(
    request: NodeRequest, folder: Path, tell: Callable[[str], None] = lambda text: None
) -> Diagnosis:
    """Examine the nodes of such a run, and the folder that would hold its run folder.

    `tell` receives lines about slow parts. Raises `RequestError` for an impossible request. No
    process is left.
    """
    left_s, target = _time_left_s(), find_place(request.place, request.rendezvous)
    try:
        if isinstance(target, AgentPlace) and (why := target.absent()):
            raise PlaceError(why)
        with _together(request) as place:
            diagnosis = _examined(request, folder, place, left_s, tell)
            place.code = EXIT_PLACE_FAILED if diagnosis.stops else EXIT_DONE
            return diagnosis
    except PlaceError as error:
        if not isinstance(target, AgentPlace):
            raise
        return _this_machine_only(request, folder, target, error, tell)


def _examined(
    request: NodeRequest,
    folder: Path,
    place: _Place,
    left_s: float | None,
    tell: Callable[[str], None],
) -> Diagnosis:
    ranks = _probed(place)
    broken: list[str] = []
    with Probes(place.processes, place.listener, place.key) as probes:
        probes.start({rank: place.doors[place.node_of[rank]] for rank in ranks})
        _examine(place, probes, folder)
        matrix = measure_links(probes, _ends_of(place, ranks), broken, tell)
        lost = {place.reports[place.node_of[rank]].name: why for rank, why in probes.lost.items()}
    reports = tuple(place.reports.values())
    collected = Collected(
        nodes=reports,
        needs_torch=needed_torch(),
        matrix=matrix,
        time_left_s=left_s,
        lost=lost,
        broken=tuple(broken),
    )
    return Diagnosis(
        place=request.place,
        ranks=request.ranks,
        asked_nodes=request.nodes,
        nodes=reports,
        matrix=matrix,
        must_be_equal=must_be_equal(reports),
        may_differ=may_differ(reports),
        findings=(*place.problems, *findings(collected)),
    )


def _this_machine_only(
    request: NodeRequest,
    folder: Path,
    target: AgentPlace,
    error: PlaceError,
    tell: Callable[[str], None],
) -> Diagnosis:
    """A diagnosis of this machine, with the reason why the nodes did not join."""
    here = NodeRequest(LOCAL, 1, 1, program=request.program)
    with _together(here) as place:
        subject = "the nodes did not come together"
        place.problems.append(Finding(STOP, subject, "", str(error), target.advice))
        diagnosis = _examined(here, folder, place, None, tell)
    return dataclasses.replace(
        diagnosis, place=request.place, ranks=request.ranks, asked_nodes=request.nodes
    )


@contextmanager
def _together(request: NodeRequest) -> Iterator[_Place]:
    """The requested nodes, or this machine, as the place of a diagnosis."""
    target = find_place(request.place, request.rendezvous)
    with ExitStack() as stack:
        if not isinstance(target, AgentPlace):
            server = stack.enter_context(ForkServer((MODULE,)))
            listener = stack.enter_context(socket.create_server((LOOPBACK.address, 0)))
            addresses = {interface.name: interface.address for interface in interfaces()}
            local = facts(request.program)
            here = NodeReport(0, local.host, LOOPBACK.address, LOOPBACK.name, addresses, local)
            door = Door(*listener.getsockname())
            key = secrets.token_hex(32)
            yield _Place(server, listener, key, {0: here}, [0] * request.ranks, {0: door})
            return
        started = stack.enter_context(target.start(request))
        expected = Expected(
            started.names, started.key, request.words, request.rendezvous.join_timeout_s
        )
        come = JoinServer(expected, started.listener, started.check).wait_for_all()
        nodes = Nodes(come, request.rendezvous.node_timeout_s, started.watch)
        place: _Place | None = None
        try:
            place = _place_of(nodes, request, started.listener, started.key, started.slots)
            yield place
        finally:
            nodes.leave(EXIT_PLACE_FAILED if place is None else place.code)


def _place_of(
    nodes: Nodes, request: NodeRequest, listener: socket.socket, key: str, slots: Sequence[int]
) -> _Place:
    """The place of nodes that have just joined; chooses the addresses that connect them."""
    problems = []
    try:
        choose_addresses(nodes)
    except PlaceError as error:
        do = "open the way between the nodes, or name the network that joins them: --interface"
        problems.append(Finding(STOP, "the nodes do not reach each other", "", str(error), do))
    counts = shares(request.ranks, len(nodes.nodes), slots)
    nodes.seats = tuple(
        node for node, count in zip(nodes.nodes, counts, strict=True) for _ in range(count)
    )
    nodes.start_servers((MODULE,))
    port = int(listener.getsockname()[1])
    return _Place(
        processes=nodes,
        listener=listener,
        key=key,
        reports={node.number: _report_of(node, nodes.nodes) for node in nodes.nodes},
        node_of=[node.number for node in nodes.seats],
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


def _probed(place: _Place) -> list[int]:
    """The ranks that get a probe: all of them if they are few, else one on each node.

    On one machine, two are enough to measure the link between its ranks.
    """
    ranks = list(range(len(place.node_of)))
    if len(ranks) > MOST_IN_FULL:
        ranks = [place.node_of.index(number) for number in dict.fromkeys(place.node_of)]
    return ranks if len(ranks) > 1 else list(range(min(2, len(place.node_of))))


def _ends_of(place: _Place, ranks: Sequence[int]) -> list[Endpoint]:
    """The endpoints of these ranks; empty if a node has no address for the others."""
    reports = [place.reports[place.node_of[rank]] for rank in ranks]
    if any(report.address is None for report in reports):
        return []
    return [
        Endpoint(rank, report.name, report.address or "")
        for rank, report in zip(ranks, reports, strict=True)
    ]


def _examine(place: _Place, probes: Probes, folder: Path) -> None:
    """Examine each node: its limits, its clock, and its view of the folder of runs."""
    with _marked(folder) as mark:
        for number, report in place.reports.items():
            rank = next((r for r in probes.there if place.node_of[r] == number), None)
            if rank is None:
                continue
            with suppress(Lost):
                message = {"do": "look", "mark": {**vars(mark)}}
                examination = Examination.from_data(probes.ask(rank, message))
                offset_s, error_s = _clock(probes, rank)
                place.reports[number] = dataclasses.replace(
                    report, examination=examination, clock_offset_s=offset_s, clock_error_s=error_s
                )


@contextmanager
def _marked(folder: Path) -> Iterator[Mark]:
    """A locked file in the folder, which other nodes must see.

    If it cannot be written, its name is empty, and the nodes report the problem.
    """
    content, path = secrets.token_hex(8), folder / f".allranks-probe-{secrets.token_hex(8)}"
    try:
        path.write_text(content)
    except OSError:
        yield Mark(str(folder), "", "")
        return
    try:
        with path.open("r+") as file:
            with suppress(OSError):  # the nodes report it too
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Mark(str(folder), path.name, content)
    finally:
        path.unlink()


def _clock(probes: Probes, rank: int) -> tuple[float, float]:
    """The remote clock minus ours, and the error, from the shortest of several round trips."""
    offsets = []
    for _ in range(CLOCK_TRIPS):
        before, begun = time.time(), time.monotonic()
        there = float(probes.ask(rank, {"do": "clock"}))
        trip_s = time.monotonic() - begun
        offsets.append((trip_s / 2, there - (before + trip_s / 2)))
    error_s, offset_s = min(offsets)
    return offset_s, error_s


def needed_torch() -> str | None:
    """The range of torch that the installed allranks requires; `None` if unknown."""
    try:
        needs = metadata.requires("allranks") or []
    except metadata.PackageNotFoundError:
        return None
    return next((need for need in needs if TORCH.match(need) and ";" not in need), None)


def _time_left_s() -> float | None:
    """The remaining seconds of the Slurm job around this process, if known."""
    try:
        job = Allocation.from_environment(os.environ)
    except RequestError:  # a run that needs these variables reports them
        return None
    return None if job is None or job.end_time_s is None else job.end_time_s - time.time()
