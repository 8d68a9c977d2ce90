"""Who runs where: hosts in order, the place of each process, and the variables that say so. Pure.

The variables of every framework are made from one `Topology`, so that no two of them can disagree.
Ranks count through the hosts in order; roles are shared out in the order in which they are named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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
        members: list[ScriptProcess] = []
        for node, host in enumerate(self.hosts):
            for local_rank in range(host.processes):
                rank = len(members)
                members.append(ScriptProcess(rank, local_rank, node, host, *named[rank]))
        return tuple(members)

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


# --- variables -----------------------------------------------------------------------------------
# The variables from which each framework reads rank and peers, from one topology. Pure.
#
#     torch       RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, TORCHELASTIC_…: torch, Lightning,
#                 Accelerate, DeepSpeed, and whatever torchrun starts
#     deepspeed   LOCAL_SIZE, CROSS_RANK, CROSS_SIZE: what its own launcher adds
#     tensorflow  TF_CONFIG
#     jax         JAX_COORDINATOR_ADDRESS and what else `jax.distributed.initialize` reads
#     mpi         OMPI_COMM_WORLD_…: scripts that look for the rank which mpirun gives
#     dmlc        DMLC_ROLE and its kin: programs with a scheduler, servers and workers
#     pmi, pmix   PMI_RANK, PMI_SIZE; PMIX_RANK, PMIX_NAMESPACE
#
# All but the last two do not disturb each other, and are set by default. An MPI library that finds
# PMI_RANK or PMIX_RANK calls the process manager behind them; there is none, so such a program
# fails in MPI_Init. They are for scripts that only read them. Open MPI sets OMPI_COMM_WORLD_… and
# never reads it: start a program that calls MPI_Init with mpirun.


FAMILIES = ("torch", "deepspeed", "tensorflow", "jax", "mpi", "dmlc", "pmi", "pmix")
ON_REQUEST = ("pmi", "pmix")
DEFAULT_FAMILIES = tuple(family for family in FAMILIES if family not in ON_REQUEST)


def parse_families(text: str) -> tuple[str, ...]:
    """`torch,jax` or `all`, in the order of the table; raises `RequestError` for other names."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    for name in sorted(names - {"all"}):
        if name not in FAMILIES:
            raise RequestError(
                asked=f"--variables {text}",
                found=f"{name!r}",
                why="variables are chosen by the framework that reads them",
                do=nearest(name, (*FAMILIES, "all")),
            )
    return tuple(family for family in FAMILIES if family in names or "all" in names)


def variables_for(
    topology: Topology,
    rank: int,
    *,
    run_id: str,
    restart_count: int = 0,
    max_restarts: int = 0,
    families: Iterable[str] = DEFAULT_FAMILIES,
) -> dict[str, str]:
    """The variables that identify process `rank`, for the chosen `families`.

    They replace those in the environment, so that no two of them disagree.
    """
    me = topology.members[rank]
    values: dict[str, str] = {}
    for family in families:
        if family == "torch":
            values |= _torch(topology, me, run_id, restart_count, max_restarts)
        else:
            values |= _FAMILIES[family](topology, me)
    if "pmix" in families:
        values["PMIX_NAMESPACE"] = run_id
    return values


def step_variables(topology: Topology, rank: int) -> dict[str, str]:
    """Slurm's variables of a task, for a process that an agent started inside such a task.

    The agent is one task of its step; scripts must not take its variables for their own.
    """
    me = topology.members[rank]
    counts = ",".join(str(host.processes) for host in topology.hosts)
    size = dict.fromkeys(
        ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(topology.world_size)
    )
    tasks = dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts)
    ids = {"SLURM_PROCID": rank, "SLURM_LOCALID": me.local_rank, "SLURM_NODEID": me.node}
    return {**{name: str(value) for name, value in ids.items()}, **size, **tasks}


def defaults_for(topology: Topology, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Defaults that a process gets unless it has `inherited` them.

    One thread per process if there are several on a host, as with torchrun; the interface of the
    job; unbuffered output, and stacks if the process dies of a signal.
    """
    host = topology.members[rank].host
    wanted = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    if host.processes > 1:
        wanted["OMP_NUM_THREADS"] = "1"
    if host.interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        wanted |= dict.fromkeys(names, host.interface)
    return {name: value for name, value in wanted.items() if name not in inherited}


def _torch(
    topology: Topology, me: ScriptProcess, run_id: str, restart_count: int, max_restarts: int
) -> dict[str, str]:
    """The variables of torchrun. Rank 0 serves the store, not the agent."""
    first = topology.hosts[0]
    values = {
        "RANK": me.rank,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_RANK": me.local_rank,
        "LOCAL_WORLD_SIZE": me.host.processes,
        "GROUP_RANK": me.node,
        "GROUP_WORLD_SIZE": topology.nodes,
        "NODE_RANK": me.node,
        "ROLE_NAME": me.role,
        "ROLE_RANK": me.role_index,
        "ROLE_WORLD_SIZE": topology.count(me.role),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": first.ports[0],
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": restart_count,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in values.items()}


def _deepspeed(topology: Topology, me: ScriptProcess) -> dict[str, str]:
    return {
        "LOCAL_SIZE": str(me.host.processes),
        "CROSS_RANK": str(me.node),
        "CROSS_SIZE": str(topology.nodes),
    }


def _tensorflow(topology: Topology, me: ScriptProcess) -> dict[str, str]:
    """TF_CONFIG, equal for all but for `task`. Nothing for a single process.

    A cluster of one worker would make `MirroredStrategy` look for devices of other machines. The
    evaluator is outside the cluster.
    """
    roles = dict(topology.roles) or {"worker": topology.world_size}
    if topology.world_size == 1 or not set(roles) <= set(TENSORFLOW_ROLES):
        return {}
    cluster: dict[str, list[str]] = {}
    for member in topology.members:
        role = member.role if topology.roles else "worker"
        if role != "evaluator":
            cluster.setdefault(role, []).append(member.endpoint)
    task = {"type": me.role if topology.roles else "worker", "index": me.role_index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def _jax(topology: Topology, me: ScriptProcess) -> dict[str, str]:
    """The address of the coordinator, and the number of this process.

    `initialize()` reads the address and the devices itself, but rank and size only from a launcher
    that it knows: if a URI of Open MPI is set, it reads OMPI_COMM_WORLD_…, and ignores the URI's
    value. Rank 0 listens at this address only.
    """
    first = topology.hosts[0]
    coordinator = f"{bracketed(first.address)}:{first.ports[0]}"
    values = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(topology.world_size),
        "JAX_PROCESS_ID": str(me.rank),
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{coordinator}",
        **_mpi(topology, me),
    }
    if me.host.processes > 1:  # one device each; a process alone on its host takes all
        values["JAX_LOCAL_DEVICE_IDS"] = str(me.local_rank)
    return values


def _mpi(topology: Topology, me: ScriptProcess) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(topology.world_size),
        "OMPI_COMM_WORLD_RANK": str(me.rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(me.host.processes),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(me.local_rank),
        "OMPI_COMM_WORLD_NODE_RANK": str(me.local_rank),
        "OMPI_UNIVERSE_SIZE": str(topology.world_size),
    }


def _dmlc(topology: Topology, me: ScriptProcess) -> dict[str, str]:
    """The scheduler's address for all. Nothing without a scheduler."""
    if not {role for role, _ in topology.roles} >= set(DMLC_ROLES):
        return {}
    scheduler = next(member for member in topology.members if member.role == "scheduler")
    return {
        "DMLC_ROLE": me.role,
        "DMLC_PS_ROOT_URI": scheduler.host.address,
        "DMLC_PS_ROOT_PORT": str(scheduler.host.ports[0]),
        "DMLC_NUM_SERVER": str(topology.count("server")),
        "DMLC_NUM_WORKER": str(topology.count("worker")),
        "DMLC_NODE_HOST": me.host.address,
        "DMLC_TASK_ID": str(me.role_index),
    }


_FAMILIES: Mapping[str, Callable[[Topology, ScriptProcess], dict[str, str]]] = {
    "deepspeed": _deepspeed,
    "tensorflow": _tensorflow,
    "jax": _jax,
    "mpi": _mpi,
    "dmlc": _dmlc,
    "pmi": lambda topology, me: {"PMI_RANK": str(me.rank), "PMI_SIZE": str(topology.world_size)},
    "pmix": lambda topology, me: {"PMIX_RANK": str(me.rank)},
}
