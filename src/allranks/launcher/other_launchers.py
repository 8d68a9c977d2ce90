"""The rank that another launcher (mpirun, srun, …) gave this process, by its variables. Pure.

srun, and the mpirun of Open MPI, MPICH, Intel MPI and MVAPICH each tell a process its rank under
names of their own. Here is the table, and what follows in the names that the rest of the field uses
(`RANK`, `WORLD_SIZE`, …). `World.from_environment` alone asks; where `RANK` is set, nobody does.

The order matters: Open MPI's mpirun starts its daemons by srun, so that its ranks see the variables
of a step of Slurm that is not theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from allranks.errors import RequestError
from allranks.launcher.slurm.allocation import Allocation, first_port, step_of

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
    """What a launcher said of this process; `None` is what it did not say.

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
    step = _in_step(environment)
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
    """What a launcher said, under the names of the field; nothing where `RANK` is set.

    `GROUP_RANK`, the number of the node, is -1 where the launcher does not say it.
    """
    launched = None if "RANK" in environment else launched_by(environment)
    if launched is None:
        return {}
    given = environment.get("WORLD_SIZE")
    if given is not None and given != str(launched.size):
        raise RequestError(
            asked=f"WORLD_SIZE={given}, and no RANK",
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
    """So many tasks a job of Slurm asked for, where nobody started them: this process is alone.

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
