"""Who runs where: the hosts of a job in order, and from them the place of each process. Pure.

The variables of every framework are made from one `Topology`, so that no two of them can disagree.
Ranks count through the hosts in order; roles are shared out in the order in which they are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from allranks.errors import RequestError, nearest

DEFAULT_ROLE = "default"
TENSORFLOW_ROLES = ("chief", "worker", "ps", "evaluator")
DMLC_ROLES = ("scheduler", "server", "worker")
ROLES = tuple(dict.fromkeys((*TENSORFLOW_ROLES, *DMLC_ROLES)))
SINGLE_ROLES = ("chief", "scheduler")


@dataclass(frozen=True)
class Host:
    """A node of the job. `address` is where the others reach it, over `interface` ("": any).

    `ports` are reserved there for the job: the first for the rendezvous, then one per process.
    """

    name: str
    address: str
    interface: str
    processes: int
    ports: tuple[int, ...]


@dataclass(frozen=True)
class ScriptProcess:
    """One process of a job: its rank, its host, and which one of its role it is."""

    rank: int
    local_rank: int
    node: int
    host: Host
    role: str
    role_index: int

    @property
    def port(self) -> int:
        """The port that is this process's own."""
        return self.host.ports[1 + self.local_rank]

    @property
    def endpoint(self) -> str:
        """`address:port` of this process; an IPv6 address stands in brackets."""
        return f"{bracketed(self.host.address)}:{self.port}"


@dataclass(frozen=True)
class Topology:
    """The processes of a job. `roles` are pairs (role, how many) that add up to them.

    Without roles all processes are alike, and are called `role_name` where a framework wants a
    word. Raises `RequestError` for what cannot be a job.
    """

    hosts: tuple[Host, ...]
    roles: tuple[tuple[str, int], ...] = ()
    role_name: str = DEFAULT_ROLE

    def __post_init__(self) -> None:
        _check_hosts(self.hosts)
        _check_roles(self.roles, self.world_size)

    @property
    def world_size(self) -> int:
        """All processes of all hosts."""
        return sum(host.processes for host in self.hosts)

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    @property
    def members(self) -> tuple[ScriptProcess, ...]:
        """All processes, by rank."""
        named = [(role, index) for role, count in self.roles for index in range(count)]
        named = named or [(self.role_name, rank) for rank in range(self.world_size)]
        return tuple(
            ScriptProcess(first + local, local, node, host, *named[first + local])
            for node, (host, first) in enumerate(zip(self.hosts, self._first_ranks(), strict=True))
            for local in range(host.processes)
        )

    def _first_ranks(self) -> list[int]:
        counts = [host.processes for host in self.hosts]
        return list(accumulate(counts, initial=0))[:-1]

    def count(self, role: str) -> int:
        """How many processes have this role."""
        return sum(member.role == role for member in self.members)


def bracketed(address: str) -> str:
    """An address as it stands before a colon and a port."""
    return f"[{address}]" if ":" in address else address


def _check_hosts(hosts: tuple[Host, ...]) -> None:
    asked = "to run on " + (", ".join(host.name for host in hosts) or "no host")
    if not hosts or any(host.processes < 1 for host in hosts):
        raise RequestError(
            asked=asked,
            found=f"processes per host: {[host.processes for host in hosts]}",
            why="a job has at least one process on each of its hosts",
            do="give each host a process, or leave it away",
        )
    endpoints = [(host.address, port) for host in hosts for port in host.ports]
    twice = next((endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1), None)
    if twice is not None:
        raise RequestError(
            asked=asked,
            found=f"{bracketed(twice[0])}:{twice[1]} twice",
            why="two processes that listen at one address cannot be told apart",
            do="give each node an address of its own, and each process a port",
        )
    for host in hosts:
        if len(host.ports) <= host.processes:
            raise RequestError(
                asked=f"{host.processes} processes on {host.name}",
                found=f"{len(host.ports)} ports",
                why="a node needs one port for the rendezvous, and one for each process",
                do=f"reserve {host.processes + 1} ports",
            )


def _check_roles(roles: tuple[tuple[str, int], ...], processes: int) -> None:
    if not roles:
        return
    asked = f"--roles {roles_as_text(roles)}"
    names = [role for role, _ in roles]
    for role, count in roles:
        if role not in ROLES:
            raise RequestError(
                asked=asked,
                found=f"the role {role!r}",
                why="a role is one that TF_CONFIG or DMLC_ROLE knows",
                do=nearest(role, ROLES),
            )
        if count < 1 or names.count(role) > 1 or (role in SINGLE_ROLES and count > 1):
            raise RequestError(
                asked=asked,
                found=f"{role}={count}" + (", twice" if names.count(role) > 1 else ""),
                why="each role is named once, with at least one process, and "
                f"{' and '.join(SINGLE_ROLES)} with exactly one",
                do=f"write {role} once, with a number that fits",
            )
    _check_kinds(asked, set(names))
    if sum(count for _, count in roles) != processes:
        total = sum(count for _, count in roles)
        raise RequestError(
            asked=f"{asked}, which are {total} processes",
            found=f"{processes} processes in the job",
            why="every process has one role",
            do=f"--ranks {total}, or roles that add up to {processes}",
        )


def _check_kinds(asked: str, names: set[str]) -> None:
    """Raise `RequestError` unless all roles are TensorFlow's, or all are DMLC's."""
    dmlc = {"scheduler", "server"} & names
    if dmlc and names & {"chief", "ps", "evaluator"}:
        raise RequestError(
            asked=asked,
            found="roles of TensorFlow and of DMLC programs",
            why="a program reads either TF_CONFIG or DMLC_ROLE",
            do=f"roles out of {', '.join(TENSORFLOW_ROLES)}, or of {', '.join(DMLC_ROLES)}",
        )
    if dmlc and names != set(DMLC_ROLES):
        raise RequestError(
            asked=asked,
            found=f"no {', no '.join(sorted(set(DMLC_ROLES) - names))}",
            why="the servers and workers meet at the scheduler, and wait until all are there",
            do="--roles scheduler=1,server=1,worker=2",
        )


def roles_as_text(roles: tuple[tuple[str, int], ...]) -> str:
    """The roles as on the command line: `chief=1,worker=2`."""
    return ",".join(f"{role}={count}" for role, count in roles)


def parse_roles(text: str) -> tuple[tuple[str, int], ...]:
    """`chief=1,worker=2` as pairs; raises `RequestError` for anything else."""
    pairs = []
    for part in filter(None, text.split(",")):
        role, equals, count = part.partition("=")
        if not equals or not (count.isascii() and count.isdigit()):
            raise RequestError(
                asked=f"--roles {text}",
                found=f"{part!r}",
                why="each role is written role=number",
                do="write it like --roles chief=1,worker=2,ps=1",
            )
        pairs.append((role.strip(), int(count)))
    return tuple(pairs)
