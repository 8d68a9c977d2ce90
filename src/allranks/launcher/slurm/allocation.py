"""What Slurm says of this process in its environment: job, nodes, tasks, time. Pure.

Inside a job Slurm sets some sixty variables. Two things make them hard to read. A *job* is what was
asked for with sbatch or salloc, a *step* is what one `srun` started in it; only inside a step is a
process one of several, and its variables (`SLURM_STEP_…`) are the ones that count there. And lists
are folded: `r[01-03,07]g[1-2]` for nodes, `2(x3),1` for the tasks on each.

`launchers` and the Slurm place ask here; nothing is started and no command of Slurm is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.errors import RequestError

Environment = Mapping[str, str]

HETEROGENEOUS = (
    "a job of one component: ranks over several components of a heterogeneous job are not "
    "supported; start each component's command with srun --het-group=N"
)

STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")
FIRST_SPECIAL_STEP = 4294967000  # the batch script, a shell of salloc, prologues: no step of srun
MOST_NODES = 100_000  # no machine has more; a folded list of a few letters may claim to
FIRST_PORT, PORTS = 15_000, 16_381  # up to 31380: below the ports that Linux gives to clients
STEP_STRIDE = 10_124  # the golden section of PORTS: the steps of one job lie far apart

NODE_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+")
BRACKET = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
GPU_COUNT = re.compile(r"(?:gpu:)?(?:[^,:]+:)?([0-9]+)")
CPUS_OF_A_TASK = re.compile(r"(?:^|,)cpu[=:]([0-9]+)")


@dataclass(frozen=True)
class Allocation:
    """The nodes and tasks that Slurm gave to this process.

    Inside a step (`step_id` is set) nodes and tasks are those of the step, and `rank`, `local_rank`
    and `node` (its place in `nodes`) say which task this process is. Outside, in a batch script or
    a shell of salloc, they are those of the job, this process is none of the tasks, and the three
    are `None`. `tasks_per_node` is then what a plain `srun` would start, which Slurm counts in CPUs
    where no tasks were asked for. What Slurm does not say is `None`; `end_time_s` is in seconds
    since 1970, `restart_count` says how often Slurm has put the job back into its queue. Of a
    heterogeneous job, which has several `components`, nodes and tasks are those of one.
    """

    job_id: int
    step_id: int | None
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    rank: int | None
    local_rank: int | None
    node: int | None
    cpus_per_task: int | None
    gpus_per_node: int | None
    end_time_s: float | None
    restart_count: int
    components: int = 1

    @property
    def size(self) -> int:
        """All tasks."""
        return sum(self.tasks_per_node)

    @classmethod
    def from_environment(cls, environment: Environment) -> Allocation | None:
        """The allocation that these variables describe; `None` outside of Slurm.

        Raises `RequestError` for variables that are missing, are no numbers, or do not agree.
        """
        job_id = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
        if job_id is None:
            return None
        step_id = step_of(environment)
        inside = step_id is not None
        nodes = _nodes(environment, inside)
        allocation = cls(
            job_id=job_id,
            step_id=step_id,
            nodes=nodes,
            tasks_per_node=_tasks(environment, len(nodes), inside),
            rank=_number(environment, "SLURM_PROCID") if inside else None,
            local_rank=_number(environment, "SLURM_LOCALID") if inside else None,
            node=_number(environment, "SLURM_NODEID") if inside else None,
            cpus_per_task=_cpus_per_task(environment),
            gpus_per_node=_gpus_per_node(environment),
            end_time_s=_number(environment, "SLURM_JOB_END_TIME"),
            restart_count=_number(environment, "SLURM_RESTART_COUNT") or 0,
            components=_number(environment, "SLURM_HET_SIZE") or 1,
        )
        if inside:
            _check_task(allocation)
        return allocation


def step_of(environment: Environment) -> int | None:
    """The step of srun that this process is a task of; `None` in a batch script, or a shell."""
    step_id = _number(environment, *STEP_VARIABLES)
    return None if step_id is None or step_id >= FIRST_SPECIAL_STEP else step_id


def expand_nodes(text: str) -> tuple[str, ...]:
    """`r[01-03,07]g[1-2],login1` -> every name, in Slurm's order; raises `RequestError`."""
    names: list[str] = []
    position = 0
    while position < len(text):
        item = NODE_ITEM.match(text, position)
        if item is None or text[item.end() : item.end() + 1] not in ("", ","):
            raise _unreadable("a list of nodes", text, "as r[01-03,07]g[1-2],login1")
        names += _expand_item(item[0], text)
        position = item.end() + 1
        if len(names) > MOST_NODES:
            raise _unreadable("a list of nodes", text, f"of at most {MOST_NODES} nodes")
    if not names or text.endswith(","):
        raise _unreadable("a list of nodes", text, "as r[01-03,07]g[1-2],login1")
    return tuple(names)


def _expand_item(item: str, text: str) -> list[str]:
    names = [""]
    for index, part in enumerate(BRACKET.split(item)):
        choices = [part] if index % 2 == 0 else _expand_ranges(part, text)
        if len(names) * len(choices) > MOST_NODES:
            raise _unreadable("a list of nodes", text, f"of at most {MOST_NODES} nodes")
        names = [name + choice for name in names for choice in choices]
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """`01-03,07` -> 01, 02, 03, 07: leading zeros are part of the names."""
    hosts: list[str] = []
    for part in ranges.split(","):
        match = RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST_NODES:
            raise _unreadable("a list of nodes", text, "with ranges as [01-03,07]")
        hosts += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return hosts


def expand_counts(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> 2, 2, 2, 1; raises `RequestError`."""
    counts: list[int] = []
    for part in text.split(","):
        match = COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise _unreadable("tasks on each node", text, "as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_port(job_id: int, step_id: int | None) -> int:
    """A port for this step of this job to try first: from 15000 to 31380.

    The 16381 jobs that follow each other in one queue get different ports, and so do the steps of
    a job. It is a first guess only: whoever owns it binds it, and takes another if it is taken.
    """
    step = 0 if step_id is None else step_id + 1
    return FIRST_PORT + (job_id + step * STEP_STRIDE) % PORTS


def _nodes(environment: Environment, inside: bool) -> tuple[str, ...]:
    names = ("SLURM_STEP_NODELIST",) if inside else ()
    names = (*names, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    text = next((environment[name] for name in names if environment.get(name)), None)
    if text is None:
        raise RequestError(
            asked=f"the nodes of Slurm's job {environment.get('SLURM_JOB_ID')}",
            found="SLURM_JOB_NODELIST is not set",
            why="Slurm sets it in every job, together with SLURM_JOB_ID",
            do="let srun or sbatch set the variables of the job, or unset SLURM_JOB_ID",
        )
    return expand_nodes(text)


def _tasks(environment: Environment, nodes: int, inside: bool) -> tuple[int, ...]:
    """Tasks on each node: as Slurm lists them, or as it would from what little was asked for."""
    scope = "SLURM_STEP_TASKS_PER_NODE" if inside else "SLURM_TASKS_PER_NODE"
    name = scope if environment.get(scope) else "SLURM_TASKS_PER_NODE"
    if environment.get(name):
        counts = expand_counts(environment[name])
    else:
        counts = _tasks_from_totals(environment, nodes)
    if len(counts) != nodes:
        raise RequestError(
            asked="tasks on each node of Slurm's allocation",
            found=f"{name}={environment.get(name)}: {len(counts)} nodes, and {nodes} in the list",
            why="there is one count for each node",
            do="set neither by hand; Slurm sets both",
        )
    total = _number(environment, "SLURM_STEP_NUM_TASKS") if inside else None
    if total is not None and total != sum(counts):
        raise RequestError(
            asked="tasks of this step of Slurm's job",
            found=f"SLURM_STEP_NUM_TASKS={total}, {name}={environment.get(name)}",
            why="they say two things about one number",
            do="set neither by hand; srun sets both",
        )
    return counts


def _tasks_from_totals(environment: Environment, nodes: int) -> tuple[int, ...]:
    each = _number(environment, "SLURM_NTASKS_PER_NODE")
    total = _number(environment, "SLURM_NTASKS", "SLURM_NPROCS")
    if each is None and total is not None and total % nodes == 0:
        each = total // nodes
    if each is None:
        raise RequestError(
            asked="tasks on each node of Slurm's allocation",
            found="neither SLURM_TASKS_PER_NODE nor SLURM_NTASKS_PER_NODE is set, "
            f"SLURM_NTASKS={environment.get('SLURM_NTASKS')}, {nodes} nodes",
            why="how many tasks are where cannot be guessed",
            do="let srun or sbatch set the variables of the job",
        )
    return (each,) * nodes


def _check_task(allocation: Allocation) -> None:
    """Raise unless this process is one of the tasks of its step."""
    rank, local_rank, node = allocation.rank, allocation.local_rank, allocation.node
    counts = allocation.tasks_per_node
    if not (
        rank is not None
        and rank < allocation.size
        and node is not None
        and node < len(counts)
        and local_rank is not None
        and local_rank < counts[node]
    ):
        raise RequestError(
            asked=f"which task of step {allocation.step_id} of job {allocation.job_id} this is",
            found=f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank}, SLURM_NODEID={node}; "
            f"tasks on each node: {', '.join(map(str, counts))}",
            why="there is no such task in this step",
            do="start it with srun, and change none of these variables"
            if allocation.components == 1
            else HETEROGENEOUS,
        )


def _cpus_per_task(environment: Environment) -> int | None:
    cpus = _number(environment, "SLURM_CPUS_PER_TASK")
    if cpus is not None:
        return cpus
    tres = CPUS_OF_A_TASK.search(environment.get("SLURM_TRES_PER_TASK", ""))
    return int(tres[1]) if tres else None


def _gpus_per_node(environment: Environment) -> int | None:
    """As counted by Slurm on this node, as asked for each node, or as listed for this node."""
    counted = _number(environment, "SLURM_GPUS_ON_NODE")
    if counted is not None:
        return counted
    text = environment.get("SLURM_GPUS_PER_NODE")
    if text:
        parts = [GPU_COUNT.fullmatch(part) for part in text.split(",")]
        if None in parts:
            raise _unreadable("SLURM_GPUS_PER_NODE", text, "as 4, a100:4 or gpu:a100:2,gpu:v100:1")
        return sum(int(part[1]) for part in parts if part)
    listed = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
    if listed and re.fullmatch(r"[0-9]+(,[0-9]+)*", listed):
        return len(listed.split(","))
    return None


def _number(environment: Environment, *names: str) -> int | None:
    """The first of these variables that is set and not empty, as a whole number from 0 up."""
    for name in names:
        text = environment.get(name)
        if text:
            if not re.fullmatch(r"[0-9]{1,15}", text):
                raise _unreadable(name, text, "a whole number")
            return int(text)
    return None


def _unreadable(name: str, text: str, shape: str) -> RequestError:
    return RequestError(
        asked=f"{name}, from Slurm's variables",
        found=repr(text),
        why=f"it is not {shape}" if shape.startswith("a ") else f"it is written {shape}",
        do="start the process with srun or sbatch, and change none of the SLURM_ variables",
    )
