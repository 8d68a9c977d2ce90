"""This machine: every rank a process here, meeting over the loopback interface only. Pure."""

from __future__ import annotations

from pathlib import Path

from allranks.config import threads_per_rank
from allranks.errors import RequestError
from allranks.job import Job
from allranks.places.base import Plan, RankPlan, Shape
from allranks.shards import busy_fraction
from allranks.world import World

STORE = ".store"


def plan(job: Job, shape: Shape) -> Plan:
    """The processes of `job` on this machine; raises `RequestError` where there is no work for all.

    The ranks meet through a file in the run folder, and Gloo is bound to `lo`: no socket of a
    local job can be reached from another machine.
    """
    if job.ranks > shape.shards:
        raise RequestError(
            asked=f"--ranks {job.ranks}",
            found=f"the task cuts its batch into shards = {shape.shards}",
            why="a rank owns whole shards, so the ranks above that number would have none",
            do=f"--ranks {shape.shards}, or --set shards={job.ranks} (another job: it changes "
            "what BatchNorm and dropout see)",
        )
    busy = busy_fraction(shape.shards, job.ranks)
    notes = []
    if busy < 1:
        notes.append(
            f"{job.ranks} ranks on {shape.shards} shards: ranks are busy {busy:.0%} of the time; "
            f"--set shards={job.ranks * -(-shape.shards // job.ranks)} would keep all busy, as another job"
        )
    store = str(Path(job.run_dir) / STORE) if job.ranks > 1 else ""
    threads = threads_per_rank(job)
    ranks = []
    for rank in range(job.ranks):
        world = World(rank, job.ranks, rank, job.ranks, 0, store)
        environment = {
            **world.variables(),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        if job.bitwise and job.device == "cuda":
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        ranks.append(RankPlan(world, environment))
    return Plan(job, shape, tuple(ranks), tuple(notes))
