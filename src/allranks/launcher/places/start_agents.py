"""How an agent comes to each node: by namespaces, by ssh, by srun, or by the user's own hand.

Each way is a context: it opens the socket at which the head listens, starts the agents as far as it
is the one who does, and ends what it started when it is left. What an agent must know goes to its
standard input, so that no list of processes shows it.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from allranks.errors import PlaceError, RequestError
from allranks.job.simulated_network import INSIDE, network_of
from allranks.launcher.nodes.interfaces import candidates, interfaces
from allranks.launcher.nodes.rendezvous import Meeting
from allranks.launcher.nodes.ticket import Ticket
from allranks.launcher.places.hostfile import HostSlots, read_hostfile
from allranks.launcher.places.simulated_nodes import SimulatedNodes
from allranks.launcher.plan import Seat
from allranks.launcher.processes import leftovers
from allranks.launcher.resources import seats_of, shares
from allranks.launcher.scripts.topology import Host
from allranks.launcher.slurm.allocation import Allocation
from allranks.launcher.slurm.commands import end_time_of

END_TIMEOUT_S = 5.0
LAST_WORDS = 2000
AGENT = ("-P", "-m", "allranks.launcher.nodes.agent")
CONTAINER = "ALLRANKS_INSIDE"
OF_THE_JOB = (  # what a batch script was given for its ranks, and srun would give to each agent
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE"),
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"),
)


@dataclass(frozen=True)
class Wanted:
    """Which nodes, and what for. `program` and `words` are compared between them.

    `shared` is a folder that all must see, `modules` is what their fork servers import. `ranks` are
    shared out over the nodes, in order.
    """

    place: str
    nodes: int
    ranks: int
    meeting: Meeting
    program: str = ""
    words: tuple[str, ...] = ()
    shared: Path | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """Agents on their way: what they are called, what they must know, where they come to.

    `check` raises `PlaceError` if one of them will not come, `watch` if what holds the nodes has
    failed. `slots` are the ranks that fit on each node, where that is known. At `ends_at` (monotonic)
    a scheduler takes the nodes away. `said(number)` is what the agent of a node has printed.
    """

    names: tuple[str, ...]
    key: str
    listener: socket.socket
    check: Callable[[], None] = lambda: None
    watch: Callable[[], None] = lambda: None
    slots: tuple[int, ...] = ()
    ends_at: float = float("inf")
    said: Callable[[int], str] = lambda number: ""
    simulated: SimulatedNodes | None = None


@contextmanager
def start_agents(wanted: Wanted) -> Iterator[Started]:
    """The agents of all nodes that are wanted, ended when it is over. Raises as its place does."""
    on_hosts = _by_hand if wanted.meeting.by_hand else _by_ssh
    ways = {"simulated": _on_simulated_nodes, "slurm": _by_srun, "hosts": on_hosts}
    with ways[wanted.place.partition(":")[0]](wanted) as started:
        yield started


def _ticket(wanted: Wanted, key: str, addresses: tuple[str, ...], port: int, node: int) -> Ticket:
    meeting = wanted.meeting
    return Ticket(
        addresses=addresses,
        port=port,
        key=key,
        node=node,
        words=wanted.words,
        program=wanted.program,
        interface=meeting.interface,
        join_timeout_s=meeting.join_timeout_s,
        node_timeout_s=meeting.node_timeout_s,
    )


def foreseen(wanted: Wanted) -> list[Seat]:
    """Where every rank would run, as far as it can be told before the nodes are there."""
    place, interface = wanted.place.partition(":")[0], wanted.meeting.interface or "?"
    names = [f"node {number}" for number in range(wanted.nodes)]
    slots: tuple[int, ...] = ()
    if place == "simulated":
        network, interface = network_of(wanted.place, wanted.nodes), INSIDE
        names = [network.name(number) for number in range(wanted.nodes)]
    elif place == "slurm":
        job = _allocation(wanted)
        names, slots = list(job.nodes[: wanted.nodes]), job.tasks_per_node
    elif wanted.meeting.hosts:
        hosts = _hosts(wanted)
        names, slots = [host.host for host in hosts], tuple(host.slots or 0 for host in hosts)
    machine = (lambda number: 0) if place == "simulated" else (lambda number: number)
    seats = [Seat(n, name, interface, machine(n)) for n, name in enumerate(names)]
    return seats_of(shares(wanted.ranks, wanted.nodes, slots), seats)


def foreseen_hosts(wanted: Wanted) -> tuple[Host, ...]:
    """The table of nodes that are not there yet: names for addresses, numbers that are no ports."""
    found: dict[str, Host] = {}
    for seat in foreseen(wanted):
        before = found[seat.host].processes if seat.host in found else 0
        ports = tuple(range(1, before + 3))
        found[seat.host] = Host(seat.host, seat.host, seat.interface, before + 1, ports)
    return tuple(found.values())


@contextmanager
def _on_simulated_nodes(wanted: Wanted) -> Iterator[Started]:
    network = network_of(wanted.place, wanted.nodes)
    key = secrets.token_hex(32)
    with SimulatedNodes(network) as made:
        host, port = made.address
        for number in range(wanted.nodes):
            made.start(number, _ticket(wanted, key, (host,), port, number))
        names = tuple(network.name(number) for number in range(wanted.nodes))
        yield Started(
            names, key, made.listener, made.check, made.check, said=made.said, simulated=made
        )


@contextmanager
def _by_hand(wanted: Wanted) -> Iterator[Started]:
    """This is node 0: the head, with an agent beside it. The others come by themselves."""
    meeting = wanted.meeting
    host, port = meeting.address
    with ExitStack() as stack:
        try:
            address = socket.gethostbyname(host)
            if address.startswith("127.") and not host.startswith("127.") and wanted.nodes > 1:
                raise OSError(f"{host} is {address} here, which no other machine reaches")
            listener = stack.enter_context(socket.create_server((address, port), backlog=1024))
        except (OSError, UnicodeError) as error:
            own = ", ".join(one.address for one in interfaces())
            raise RequestError(
                asked=f"--rendezvous {meeting.rendezvous} --node-rank 0",
                found=f"{error} on {socket.gethostname()}, which has {own or '127.0.0.1'}",
                why="node 0 listens there, and all others come to it",
                do="name an address of node 0 that all nodes reach, and a port that is free",
            ) from None
        agents = stack.enter_context(_Agents())
        ticket = _ticket(wanted, meeting.key, (address,), port, 0)
        agents.start("node 0", [sys.executable, *AGENT], ticket)
        names = tuple(f"node {number}" for number in range(wanted.nodes))
        yield Started(names, meeting.key, listener, agents.check, said=agents.said)


@contextmanager
def _by_ssh(wanted: Wanted) -> Iterator[Started]:
    """One agent on each host of a file; the same Python and folder must be there."""
    hosts, key = _hosts(wanted), secrets.token_hex(32)
    if shutil.which("ssh") is None:
        raise PlaceError("--hosts needs the command ssh, and there is none on this machine")
    with ExitStack() as stack:
        listener, addresses = _listen_to_all(stack, wanted.meeting)
        agents = stack.enter_context(_Agents())
        there = shlex.join(["cd", os.getcwd()])
        command = shlex.join([sys.executable, *AGENT])
        for number, host in enumerate(hosts):
            ticket = _ticket(wanted, key, addresses, listener.getsockname()[1], number)
            words = ["ssh", "-o", "BatchMode=yes", "-T", host.host, f"{there} && exec {command}"]
            agents.start(host.host, words, ticket)
        names, slots = tuple(host.host for host in hosts), tuple(host.slots or 0 for host in hosts)
        yield Started(names, key, listener, agents.check, slots=slots, said=agents.said)


@contextmanager
def _by_srun(wanted: Wanted) -> Iterator[Started]:
    """Inside of a Slurm job: one task for every node (or for every rank), each an agent."""
    job, key = _allocation(wanted), secrets.token_hex(32)
    if shutil.which("srun") is None:
        raise PlaceError(
            "--place slurm needs the command srun, and there is none here: in a container?"
        )
    with ExitStack() as stack:
        listener, addresses = _listen_to_all(stack, wanted.meeting)
        agents = stack.enter_context(_Agents())
        tasks = wanted.ranks if wanted.meeting.per_rank else wanted.nodes
        ticket = _ticket(wanted, key, addresses, listener.getsockname()[1], 0)
        agents.start("srun", _srun(job, wanted, tasks), ticket.for_task(), without=OF_THE_JOB)
        names = job.nodes[: wanted.nodes]
        if wanted.meeting.per_rank:
            names = tuple(f"task {number}" for number in range(tasks))
        slots, end = job.tasks_per_node, _end_of(job)
        yield Started(names, key, listener, agents.check, slots=slots, ends_at=end)


def _hosts(wanted: Wanted) -> tuple[HostSlots, ...]:
    """The hosts of the file, as many as are wanted."""
    hosts = read_hostfile(wanted.meeting.hosts)
    if len(hosts) < wanted.nodes:
        raise RequestError(
            asked=f"--hosts {wanted.meeting.hosts} --nodes {wanted.nodes}",
            found=f"{len(hosts)} hosts in it",
            why="every node is a host of its own",
            do=f"--nodes {len(hosts)}, or name more hosts",
        )
    return hosts[: wanted.nodes]


def _allocation(wanted: Wanted) -> Allocation:
    """What Slurm has given; raises `RequestError` if it is nothing, or less than is wanted."""
    job = Allocation.from_environment(os.environ)
    if job is None:
        raise RequestError(
            asked="--place slurm",
            found="no Slurm job around this process (SLURM_JOB_ID is not set)",
            why="the nodes are those that Slurm has given to the job",
            do="`allranks submit -- train …`, or start it in a batch script or under salloc",
        )
    if wanted.nodes > len(job.nodes):
        raise RequestError(
            asked=f"--nodes {wanted.nodes}",
            found=f"job {job.job_id} has {len(job.nodes)} nodes: {', '.join(job.nodes)}",
            why="a job gets no more nodes than Slurm has given to it",
            do=f"--nodes {len(job.nodes)}, or submit it again with --nodes={wanted.nodes}",
        )
    return job


def _end_of(job: Allocation) -> float:
    """When Slurm ends the job, on the monotonic clock; infinite if it has no limit."""
    end_s = job.end_time_s if job.end_time_s is not None else end_time_of(job.job_id)
    return float("inf") if end_s is None else time.monotonic() + end_s - time.time()


def _srun(job: Allocation, wanted: Wanted, tasks: int) -> list[str]:
    """A step that holds all that the job was given, and that outlives one of its nodes."""
    words = ["srun", f"--nodes={wanted.nodes}", f"--ntasks={tasks}", "--kill-on-bad-exit=0"]
    words += ["--no-kill", "--export=ALL", "--unbuffered", "--distribution=block"]
    if not wanted.meeting.per_rank:
        words += ["--ntasks-per-node=1", "--cpu-bind=none", "--mem=0", "--overlap"]
    if job.cpus_per_task is not None and len(set(job.tasks_per_node)) == 1:
        tasks_of_an_agent = 1 if wanted.meeting.per_rank else max(job.tasks_per_node)
        words.append(f"--cpus-per-task={job.cpus_per_task * tasks_of_an_agent}")
    inside = shlex.split(os.environ.get(CONTAINER, ""))  # a container that this head is in too
    return [*words, *inside, sys.executable, *AGENT]


def _listen_to_all(stack: ExitStack, meeting: Meeting) -> tuple[socket.socket, tuple[str, ...]]:
    """A socket for agents of other machines, and the addresses at which they may find it.

    It listens at one address with --interface, and where there is only one; else at all, since it
    is not known yet which of them the nodes reach. Nobody is told anything without the key.
    """
    own = candidates("", meeting.interface)
    addresses = tuple(one.address for one in own) or ("127.0.0.1",)
    at = addresses[0] if len(addresses) == 1 else ""
    listener = stack.enter_context(socket.create_server((at, 0), backlog=1024))
    return listener, addresses


class _Agents:
    """Commands that bring an agent to its node; what they say is kept for the case of failure."""

    def __init__(self) -> None:
        self._all: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []

    def start(
        self, name: str, command: list[str], ticket: Ticket, without: Sequence[str] = ()
    ) -> None:
        """Start it, in this environment but for the variables `without`."""
        output = tempfile.TemporaryFile()
        mark = f"{leftovers.owner()}/agents"
        inherited = {name: v for name, v in os.environ.items() if name not in without}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**inherited, leftovers.VARIABLE: mark},
        )
        assert process.stdin is not None
        self._all.append((name, process, output))
        with closing(process.stdin) as pipe:
            pipe.write(ticket.to_line().encode())

    def check(self) -> None:
        """Raise `PlaceError` if one has ended before its agent came."""
        for name, process, output in self._all:
            if process.poll() is not None:
                output.seek(0)
                said = output.read().decode(errors="replace").strip()
                raise PlaceError(
                    f"{name} could not be started: its command "
                    f"ended with code {process.returncode}\n{said}".rstrip()
                )

    def said(self, number: int) -> str:
        """What the command that brought this agent has printed, the end of it."""
        if number >= len(self._all):
            return ""
        output = self._all[number][2]
        output.seek(0)
        return output.read().decode(errors="replace")[-LAST_WORDS:]

    def __enter__(self) -> _Agents:
        return self

    def __exit__(self, *error: object) -> None:
        """They end by themselves when the head lets them go; one that does not is killed."""
        for _name, process, output in self._all:
            if error[0] is not None:  # who has not come yet goes on looking for the head
                process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            output.close()
