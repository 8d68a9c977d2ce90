"""Who am I: the rank of this process and its place among the others. The only reader of them.

The standard variables of the field (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, …) and the few of ours are
written in `variables` and read in `World.from_environment`, nowhere else; which devices a process
may use (`CUDA_VISIBLE_DEVICES`) is read and written in `Visible` alone.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

from allranks.errors import RequestError
from allranks.launcher.heartbeat import Group
from allranks.launcher.slurm.allocation import STEP_VARIABLES, Allocation, first_port, step_of
from allranks.strategies.roles import TRAINER

# --- other launchers -----------------------------------------------------------------------------
# The rank that another launcher (mpirun, srun, …) gave this process, by its variables. Pure.
#
# srun, and the mpirun of Open MPI, MPICH, Intel MPI and MVAPICH each tell a process its rank under
# names of their own. Here is the table, and what follows in the names that the rest of the field
# uses (`RANK`, `WORLD_SIZE`, …). `World.from_environment` alone asks; where `RANK` is set, nobody
# does.
#
# The order matters: Open MPI's mpirun starts its daemons by srun, so that its ranks see the
# variables of a step of Slurm that is not theirs.


Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher for rank, size, and both on this node; the first that is set."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


LAUNCHERS = (
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "MPICH or Intel MPI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ),
)


@dataclass(frozen=True)
class Launched:
    """What a launcher sets for this process; `None` for what it does not set.

    `node` counts the nodes of the job from 0.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None


def launched_by(environment: Environment) -> Launched | None:
    """What srun or an mpirun says of this process; `None` for one that is alone.

    Raises `RequestError` for variables that are no numbers, are missing or cannot be together.
    """
    step = _in_step(environment) if environment.keys() & set(STEP_VARIABLES) else None
    for launcher in LAUNCHERS:
        rank = _number(environment, launcher.rank, launcher.name)
        size = _number(environment, launcher.size, launcher.name)
        if rank is not None or size is not None:
            return _checked(_by_mpi(environment, launcher, rank, size, step))
    if step is not None:
        return step
    rank = _number(environment, ("PMIX_RANK",), "PMIx")
    if rank is None:
        return None
    raise RequestError(
        asked=f"the world of the process with PMIX_RANK={rank}",
        found="no variable that says how many there are",
        why="PMIx tells the rank in a variable, and the size only to MPI",
        do="start it with mpirun, srun or torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK",
    )


def standard_variables(environment: Environment) -> dict[str, str]:
    """The launcher's values under torch's names of variables; empty if `RANK` is set.

    `GROUP_RANK`, the number of the node, is -1 if the launcher does not set it.
    """
    launched = None if "RANK" in environment else launched_by(environment)
    if launched is None:
        return {}
    size = environment.get("WORLD_SIZE")
    if size is not None and size != str(launched.size):
        raise RequestError(
            asked=f"WORLD_SIZE={size}, and no RANK",
            found=f"{launched.launcher} started {launched.size} processes, this is {launched.rank}",
            why="they would wait for each other for ever",
            do="unset WORLD_SIZE, or set RANK too",
        )
    variables = {"RANK": str(launched.rank), "WORLD_SIZE": str(launched.size)}
    if launched.local_rank is not None:
        variables["LOCAL_RANK"] = str(launched.local_rank)
    if launched.local_size is not None:
        variables["LOCAL_WORLD_SIZE"] = str(launched.local_size)
    variables["GROUP_RANK"] = str(-1 if launched.node is None else launched.node)
    return variables


def tasks_not_started(environment: Environment) -> int:
    """The tasks that a Slurm job requested but did not start: this process is alone.

    1 for a process that has a rank, and outside of Slurm.
    """
    if "RANK" in environment or launched_by(environment) is not None:
        return 1
    with suppress(RequestError):  # a shell of Slurm of which one cannot say more
        if (allocation := Allocation.from_environment(environment)) is not None:
            return allocation.size
    return 1


def missing_master_address(environment: Environment) -> dict[str, str]:
    """`MASTER_ADDR` and `MASTER_PORT` of a step of srun, as far as they are not set.

    Rank 0 runs on the first node of the step; the port follows from job and step, so that two
    jobs on one node meet at two. Empty outside of a step.
    """
    allocation = Allocation.from_environment(environment)
    if allocation is None or allocation.step_id is None:
        return {}
    port = first_port(allocation.job_id, allocation.step_id)
    point = {"MASTER_ADDR": allocation.nodes[0], "MASTER_PORT": str(port)}
    return {name: value for name, value in point.items() if not environment.get(name)}


def _in_step(environment: Environment) -> Launched | None:
    """This task of a step; `None` in a batch script, which is one process whatever was asked."""
    if step_of(environment) is None:
        return None
    allocation = Allocation.from_environment(environment)
    if allocation is None or allocation.rank is None or allocation.node is None:
        return None
    return Launched(
        launcher="srun",
        rank=allocation.rank,
        size=allocation.size,
        local_rank=allocation.local_rank,
        local_size=allocation.tasks_per_node[allocation.node],
        node=allocation.node,
    )


def _by_mpi(
    environment: Environment,
    launcher: Launcher,
    rank: int | None,
    size: int | None,
    step: Launched | None,
) -> Launched:
    if rank is None or size is None:
        missing = launcher.rank if rank is None else launcher.size
        raise RequestError(
            asked=f"the rank of this process from {launcher.name}",
            found=f"{missing[0]} is not set, and its companion is",
            why="a rank means something only together with the number of ranks",
            do="start it with mpirun, or set RANK and WORLD_SIZE",
        )
    local_rank = _number(environment, launcher.local_rank, launcher.name)
    local_size = _number(environment, launcher.local_size, launcher.name)
    node = None
    if step is not None and (step.rank, step.size) == (rank, size):
        # `srun --mpi=pmi2`: the step is these very processes, and Slurm knows where they are
        local_rank = step.local_rank if local_rank is None else local_rank
        local_size = step.local_size if local_size is None else local_size
        node = step.node
    if local_size == size:
        node = 0
    return Launched(launcher.name, rank, size, local_rank, local_size, node)


def _checked(launched: Launched) -> Launched:
    local_rank, local_size = launched.local_rank, launched.local_size
    local_fits = local_rank is None or local_rank < (local_size or launched.size)
    if launched.rank < launched.size and local_fits and (local_size or 0) <= launched.size:
        return launched
    raise RequestError(
        asked=f"to be rank {launched.rank} of {launched.size}",
        found=f"by {launched.launcher}; on this node {local_rank} of {local_size}",
        why="ranks count from 0 up to their number, which is excluded",
        do="start it with mpirun, and change none of its variables",
    )


def _number(environment: Environment, names: tuple[str, ...], launcher: str) -> int | None:
    for name in names:
        text = environment.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise RequestError(
                asked=f"the rank of this process from {launcher}",
                found=f"{name}={text!r}",
                why="this variable is a whole number, set by the launcher",
                do="start it with that launcher, or set RANK and WORLD_SIZE",
            )
        return int(text)
    return None


SECRET = "ALLRANKS_SECRET"
OURS = (
    *("store", "attempt", "restarts", "heartbeat", "segment", "rendezvous", "listener"),
    *("on_machine", "role", "role_index", "local_index", "local_ranks", "group", "member"),
)
VARIABLES = {
    **{"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"},
    **{"local_size": "LOCAL_WORLD_SIZE", "node": "GROUP_RANK"},
    **{name: f"ALLRANKS_{name.upper()}" for name in OURS},
}
"""Field of `World` -> the variable that has it."""
TEXTS = ("store", "rendezvous", "role")
OF_ROLES = ("role", "role_index", "local_index", "local_ranks")
OF_ELASTIC = ("group", "member")


@dataclass(frozen=True)
class World:
    """One process among `size`: `rank` over all nodes, `local_rank` on this one.

    `node` counts the nodes from 0; it is -1 where another launcher did not say it.

    `store` is the file through which the ranks of one machine meet; empty when they meet through
    `MASTER_ADDR` (a script started by another launcher), or when there is only one. `attempt`
    counts the attempts of the job in its run folder, `restarts` those since it was last started by
    hand; `heartbeat` is the file descriptor of the memory that this rank
    shares with its supervisor, and `segment` that of memory that all ranks of this node were given,
    empty, to exchange tensors in it; -1 if it has none. Ranks of several nodes meet at `rendezvous`
    ("address:port"), where rank 0 listens at the socket that it was given, `listener`. `on_machine`
    ranks share its processors: those of this node, and of others that are simulated beside it.

    In an elastic job ranks leave and join: `group` is the number of the group that trains, `member`
    the row of this process in the heartbeats, its log and its events, which stays the same (-1
    where it is the rank). A process that joins has `group` -1 until it is in one. On several nodes
    each has a `listener`, and the first one of a group serves the store in which it meets.

    Processes that are in no group know each other by `secret`, which their launcher gave to all.

    `role` is what this process is to the others ("trainer" unless the strategy has roles), and
    `role_index` which of that role; trainers are counted by `rank` alone. Of the processes of this
    node `local_ranks` are such as `--ranks` counts, and this is number `local_index` of them, -1 if
    it is none: where there are roles, these alone have devices.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    store: str = ""
    attempt: int = 0
    restarts: int = 0
    heartbeat: int = -1
    segment: int = -1
    rendezvous: str = ""
    listener: int = -1
    on_machine: int = 0
    role: str = TRAINER
    role_index: int = 0
    local_index: int = -1
    local_ranks: int = 0
    group: int = 0
    member: int = -1
    secret: str = field(default="", repr=False)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def number(self) -> int:
        """The number of this process in the job: the rank that it began with."""
        return self.rank if self.member < 0 else self.member

    @property
    def base_store(self) -> str:
        """The file through which the first group met, if these are ranks of one machine."""
        return re.sub("-group-[0-9]+$", "", self.store)

    def in_group(self, group: Group) -> World:
        """This process in the next group of an elastic job, which meets at a store of its own."""
        store = f"{self.base_store}-group-{group.number}" if self.store else ""
        rank, size = group.members.index(self.number), len(group.members)
        world = dataclasses.replace(self, rank=rank, size=size, store=store)
        meets = group.store or self.rendezvous
        return dataclasses.replace(world, group=group.number, member=self.number, rendezvous=meets)

    def variables(self) -> dict[str, str]:
        """The environment that makes a process this member of the world."""
        omitted = {*OF_ROLES} if self.role == TRAINER else set[str]()
        omitted |= {*OF_ELASTIC} if self.member < 0 else set[str]()
        names = [name for name in VARIABLES if name not in omitted]
        values = {VARIABLES[name]: str(getattr(self, name)) for name in names}
        return values | ({SECRET: self.secret} if self.secret else {})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """The world that the launcher of this process described; one rank alone if none did."""
        variables = os.environ if environment is None else environment
        # those of srun or mpirun, if there is no RANK
        variables = {**standard_variables(variables), **variables}
        try:
            rank, size = variables.get("RANK", "0"), variables.get("WORLD_SIZE", "1")
            texts = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, **variables}
            values = {name: texts[v] for name, v in VARIABLES.items() if v in texts}
            fields: dict[str, Any] = {
                name: text if name in TEXTS else int(text) for name, text in values.items()
            }
            world = cls(**fields, secret=variables.get(SECRET, ""))
        except ValueError as error:
            raise RequestError(
                asked="the rank of this process from RANK, WORLD_SIZE and LOCAL_RANK",
                found=str(error),
                why="these variables are whole numbers, set by the launcher of the process",
                do="start it with `allranks train`, torchrun or srun, or unset them",
            ) from None
        if world.size > 1 and "RANK" not in variables:
            raise RequestError(
                asked=f"to be one of WORLD_SIZE={world.size} ranks",
                found="no RANK in the environment",
                why="every process would take itself for rank 0, and write over the others",
                do="start it with `allranks run`, torchrun or srun, which set both, or unset it",
            )
        if not 0 <= world.rank < world.size:
            raise RequestError(
                asked=f"to be rank {world.rank} of {world.size}",
                found=f"RANK={world.rank}, WORLD_SIZE={world.size}",
                why="ranks count from 0 up to the world size, which is excluded",
                do="set both, or unset both to run alone",
            )
        return world


def master_endpoint() -> str:
    """ "address:port" of the store that rank 0 serves under another launcher; "" if unknown.

    Under srun it sets MASTER_ADDR and MASTER_PORT if they are missing: torch reads them itself.
    """
    os.environ.update(missing_master_address(os.environ))
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else ""


@dataclass(frozen=True)
class Visible:
    """The devices that this process may use, as CUDA names them; `None` where all are visible.

    `numbers` are indices of the machine, or names like `GPU-8932f937…`. A process counts its
    devices from 0 among them.
    """

    numbers: tuple[str, ...] | None = None

    VARIABLE: ClassVar[str] = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Visible:
        """What the environment says; as in CUDA, -1 hides itself and all that follow."""
        text = (os.environ if environment is None else environment).get(cls.VARIABLE)
        if text is None:
            return cls()
        numbers = [part.strip() for part in text.split(",")] if text.strip() else []
        return cls(tuple(takewhile(lambda number: number != "-1", numbers)))

    def chosen(self, wanted: tuple[int, ...]) -> Visible:
        """Those of these devices that are `wanted`, counted among them; raises `RequestError`."""
        if self.numbers is None:
            return Visible(tuple(map(str, wanted)))
        beyond = [number for number in wanted if number >= len(self.numbers)]
        if beyond:
            listed, count = ",".join(self.numbers), len(self.numbers)
            raise RequestError(
                asked=f"--devices {','.join(map(str, wanted))}",
                found=f"{self.VARIABLE}={listed} in the environment: {count} devices",
                why=f"--devices counts within them, from 0, and {beyond[0]} is beyond",
                do=f"--devices {','.join(map(str, range(count)))}, or unset {self.VARIABLE}"
                if count
                else f"unset {self.VARIABLE}",
            )
        return Visible(tuple(self.numbers[number] for number in wanted))

    def variables(self) -> dict[str, str]:
        """The environment in which a process sees these devices, and no other."""
        return {} if self.numbers is None else {self.VARIABLE: ",".join(self.numbers)}
