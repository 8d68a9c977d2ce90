"""The nodes of the Slurm job around this process: srun starts an agent on each, or per rank."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from allranks.errors import PlaceError, RequestError
from allranks.launcher.places import AgentPlace, NodeRequest, Started, seats_on
from allranks.launcher.places.agents import AGENT, Agents, listen_to_all, ticket_for
from allranks.launcher.plan import Seat
from allranks.launcher.slurm.allocation import HETEROGENEOUS, Allocation
from allranks.launcher.slurm.commands import end_time_of

CONTAINER = "ALLRANKS_INSIDE"
# what a batch script was given for its ranks, and srun would give to each agent
VARIABLES_NOT_FOR_SRUN = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE"),
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"),
)


class SlurmJob(AgentPlace):
    """The nodes of the job's Slurm allocation."""

    name = "slurm"
    lends_nodes = True
    starts_ranks = True
    advice = "allranks submit -- …, or start it in a batch script or under salloc"

    def seats(self, request: NodeRequest) -> list[Seat]:
        job = _allocation(request)
        return seats_on(request, job.nodes[: request.nodes], job.tasks_per_node)

    def absent(self) -> str:
        if Allocation.from_environment(os.environ) is not None:
            return ""
        return "there is no Slurm job around this process (SLURM_JOB_ID is not set)"

    @contextmanager
    def start(self, request: NodeRequest) -> Iterator[Started]:
        """Start one step of srun, with a task per node (or per rank), each of which is an agent."""
        job, key, per_rank = (
            _allocation(request),
            secrets.token_hex(32),
            request.rendezvous.per_rank,
        )
        if shutil.which("srun") is None:
            raise PlaceError(
                "--place slurm needs the command srun, and there is none here: in a container?"
            )
        with ExitStack() as stack:
            listener, addresses = listen_to_all(stack, request.rendezvous)
            agents = stack.enter_context(Agents())
            tasks = request.ranks if per_rank else request.nodes
            ticket = ticket_for(request, key, addresses, listener.getsockname()[1], None)
            words = _srun(job, request, tasks)
            agents.start("srun", words, ticket, without=VARIABLES_NOT_FOR_SRUN)
            names = job.nodes[: request.nodes]
            if per_rank:
                names = tuple(f"task {number}" for number in range(tasks))
            slots, end = job.tasks_per_node, _end_of(job)
            yield Started(names, key, listener, agents.check, slots=slots, ends_at=end)


def _allocation(request: NodeRequest) -> Allocation:
    """The allocation; raises `RequestError` if there is none, or if it is too small."""
    job = Allocation.from_environment(os.environ)
    if job is None:
        raise RequestError(
            asked="--place slurm",
            found="no Slurm job around this process (SLURM_JOB_ID is not set)",
            why="the nodes are those that Slurm has given to the job",
            do="`allranks submit -- train …`, or start it in a batch script or under salloc",
        )
    if request.nodes > len(job.nodes):
        there, again = f"job {job.job_id} has", f"submit it again with --nodes={request.nodes}"
        if job.components > 1:
            there = f"this component of job {job.job_id}, which has {job.components}, has"
            again = HETEROGENEOUS
        raise RequestError(
            asked=f"--nodes {request.nodes}",
            found=f"{there} {len(job.nodes)} nodes: {', '.join(job.nodes)}",
            why="a job gets no more nodes than Slurm has given to it",
            do=f"--nodes {len(job.nodes)}, or {again}",
        )
    return job


def _end_of(job: Allocation) -> float:
    """When Slurm ends the job, on the monotonic clock; infinite if it has no limit."""
    end_s = job.end_time_s if job.end_time_s is not None else end_time_of(job.job_id)
    return float("inf") if end_s is None else time.monotonic() + end_s - time.time()


def _srun(job: Allocation, request: NodeRequest, tasks: int) -> list[str]:
    """A step with the whole allocation, which survives the loss or the leave of one of its nodes.

    Without `--wait=0` a site may have srun end the other agents some time after the first has left.
    """
    words = ["srun", f"--nodes={request.nodes}", f"--ntasks={tasks}", "--kill-on-bad-exit=0"]
    words += ["--no-kill", "--wait=0", "--export=ALL", "--unbuffered", "--distribution=block"]
    if not request.rendezvous.per_rank:
        words += ["--ntasks-per-node=1", "--cpu-bind=none", "--mem=0", "--overlap"]
    if job.cpus_per_task is not None and len(set(job.tasks_per_node)) == 1:
        tasks_of_an_agent = 1 if request.rendezvous.per_rank else max(job.tasks_per_node)
        words.append(f"--cpus-per-task={job.cpus_per_task * tasks_of_an_agent}")
    inside = shlex.split(os.environ.get(CONTAINER, ""))  # the container of this head
    return [*words, *inside, sys.executable, *AGENT]
