"""A job from request to result: describe the task, plan, make the run folder, try, conclude.

Used by every verb that trains: `train`, `check`, and the tests. Nothing else starts ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES, NODES, load
from allranks.checkpoint.folder import committed
from allranks.errors import Interrupted, RequestError
from allranks.job.config import Resolved
from allranks.job.engines import check_installed, preload_for
from allranks.job.job import Job, redacted
from allranks.job.limits import checked
from allranks.job.resume import CHECKPOINTS, changed, changed_fields
from allranks.job.run_folder import RunFolder, read_rows
from allranks.launcher.attempts import Attempts
from allranks.launcher.describe import EqualityProof, chosen_by_dial, describe
from allranks.launcher.places import (
    AgentPlace,
    NodeRequest,
    Rendezvous,
    check_server_nodes,
    find_place,
)
from allranks.launcher.plan import LaunchPlan, LocalMachine, Resources
from allranks.launcher.processes.fork_server_client import HASH_SEED, ForkServer
from allranks.launcher.processes.leftovers import sweep
from allranks.launcher.supervisor import Signals

SETTINGS = ("CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_")
"""How the variables begin that are settings of the libraries below the ranks."""
RECORDED = frozenset(
    (
        *("ALLRANKS_INSIDE", "CONDA_DEFAULT_ENV", "CONDA_PREFIX", "HOSTNAME", "LD_LIBRARY_PATH"),
        *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "PATH"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONMALLOC"),
        *("PYTHONNOUSERSITE", "PYTHONOPTIMIZE", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
        *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_CONF"),
        *("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION"),
        *("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"),
        *("SLURM_JOB_ACCOUNT", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_JOB_ID"),
        *("SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION"),
        *("SLURM_JOB_QOS", "SLURM_JOB_USER", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
        *("SLURM_MEM_PER_NODE", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_NTASKS"),
        *("SLURM_NTASKS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_TASKS_PER_NODE"),
        *("SLURM_TRES_PER_TASK", "SLURMD_NODENAME", "VIRTUAL_ENV"),
    )
)
_runs = itertools.count(1)


@dataclass(frozen=True)
class Result:
    """A job or a command that ended well: its run folder, and its summary."""

    run_dir: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class JobWatcher:
    """Callbacks while a job runs: once its plan is made, and at every tick."""

    started: Callable[[LaunchPlan], None] = lambda plan: None
    tick: Callable[[], None] = lambda: None


FirstCheck = Callable[[Resolved, LaunchPlan, Resources, Signals], EqualityProof | None]


def with_run_dir(job: Job) -> Job:
    """The job with the whole path of its run folder; a new name if it has none."""
    return dataclasses.replace(
        job, run_dir=os.path.abspath(job.run_dir or new_run_dir(job.program))
    )


def plan_job(
    resolved: Resolved,
    resources: Resources,
    signals: Signals | None = None,
    described: Job | None = None,
) -> LaunchPlan:
    """The plan of a job, with the strategy that `auto` has chosen, if it was asked for.

    Its task is loaded in a forked process, as that of the job `described` if that is given, and
    leaves no file.
    """
    job = with_run_dir(resolved.job)
    shape = describe(resources, described or job, signals)
    decision = chosen_by_dial(resources, resolved, job, shape, signals)
    if decision is None:
        return resources.plan(job, shape)
    job = checked(dataclasses.replace(job, strategy=decision.did))
    plan = resources.plan(job, shape)
    note = f"{decision.asked} -> {decision.did}: {decision.why}"
    return dataclasses.replace(plan, notes=(note, *plan.notes), decision=decision)


def _nodes_for(
    job: Job, rendezvous: Rendezvous, words: tuple[str, ...] = (), modules: tuple[str, ...] = ()
) -> NodeRequest:
    """The nodes of a job, all of which see the folder that its run folder is in."""
    program = job.program if ".py" in job.program else ""
    shared = Path(job.run_dir).parent
    where = job.place, job.nodes, job.ranks, rendezvous
    request = NodeRequest(*where, program, words, shared, modules, server_nodes=job.nodes_apart)
    check_server_nodes(request)
    return request


@contextmanager
def plan_only(
    resolved: Resolved, rendezvous: Rendezvous
) -> Iterator[tuple[LaunchPlan, ForkServer]]:
    """What would run where; no node is contacted, and no device is needed here."""
    job = with_run_dir(resolved.job)
    resolved = dataclasses.replace(resolved, job=job)
    check_installed(job.engine, job.program)
    with ForkServer(preload_for(job.program, job.engine)) as server:
        seats = find_place(job.place, rendezvous).seats(_nodes_for(job, rendezvous))
        resources = LocalMachine(server, tuple(seats))
        described = dataclasses.replace(job, device="cpu")
        yield plan_job(resolved, resources, described=described), server


def look_at_program(jobs: Iterable[Job]) -> None:
    """Load the task of these jobs, which differ in their fields, until one loads.

    Raises the `RequestError` of the first if none does.
    """
    problem: RequestError | None = None
    with ExitStack() as stack:
        server: ForkServer | None = None
        for job in jobs:
            check_installed(job.engine, job.program)
            server = server or stack.enter_context(ForkServer(preload_for(job.program, job.engine)))
            try:
                describe(LocalMachine(server), dataclasses.replace(job, device="cpu"))
                return
            except RequestError as error:
                problem = problem or error
    if problem is not None:
        raise problem


def fields_of(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """All fields of the task of each of these jobs, with their defaults; loads each task."""
    if not jobs:
        return []
    check_installed(jobs[0].engine, jobs[0].program)
    with ForkServer(preload_for(jobs[0].program, jobs[0].engine)) as server:
        machine = LocalMachine(server)
        return [describe(machine, dataclasses.replace(job, device="cpu")).fields for job in jobs]


@contextmanager
def resources_for(
    job: Job, rendezvous: Rendezvous, words: tuple[str, ...] = (), signals: Signals | None = None
) -> Iterator[Resources]:
    """Where this job runs: a fork server here, or its nodes, once all have joined."""
    check_installed(job.engine, job.program)
    modules = preload_for(job.program, job.engine)
    if not isinstance(find_place(job.place, rendezvous), AgentPlace):
        with ForkServer(modules) as server:
            yield LocalMachine(server)
        return

    def interrupted() -> None:
        if signals is not None and signals.reason:
            raise Interrupted(f"interrupted ({signals.reason}) before anything was started")

    request = _nodes_for(job, rendezvous, words, modules)
    sweep(request.shared)
    with load(NODES).gathered(request, interrupted) as cluster:
        cluster.plant(job.inject)
        yield cluster


def run_job(
    resolved: Resolved,
    server: ForkServer | None = None,
    watcher: JobWatcher | None = None,
    signals: Signals | None = None,
    rendezvous: Rendezvous | None = None,
    words: tuple[str, ...] = (),
    resources: Resources | None = None,
    first_check: FirstCheck | None = None,
) -> Result:
    """Run a job to its end and return its result.

    Without `server` or `resources` it starts what the job needs: here, or on nodes that join as
    `rendezvous` says, each started with the same `words`. `signals` are the caller's handlers;
    without it they are installed meanwhile. `first_check` compares the job with one process before
    it starts; what it raises ends the job.

    Raises `RequestError` (and leaves no run folder) if the request, the task or its data is wrong
    and no update was made; `ProgramError` with the first-fault report if the program failed and
    no restart is left; `Stopped` if it was asked to stop and has committed a checkpoint;
    `Interrupted` if there is none. No process is left in any case.
    """
    watcher = watcher or JobWatcher()
    started_at = time.monotonic()
    with ExitStack() as stack:
        signals = signals or stack.enter_context(Signals())
        resolved = dataclasses.replace(resolved, job=with_run_dir(resolved.job))
        if server is not None:
            resources = LocalMachine(server)
        if resources is None:
            resources = stack.enter_context(
                resources_for(resolved.job, rendezvous or Rendezvous(), words, signals)
            )
        plan = plan_job(resolved, resources, signals)
        changes = _changes(resolved, plan)
        proof = None if first_check is None else first_check(resolved, plan, resources, signals)
        folder = RunFolder(Path(plan.job.run_dir), resumes=_resumes(resolved))
        stack.callback(folder.close)
        try:
            folder.take_room(rank.world.rank for rank in plan.ranks)
            _record_start(folder, resolved, plan, changes, resources.server.hash_seed, proof)
            with suppress(OSError):  # a display must not end the training
                watcher.started(plan)
            attempts = Attempts(resources, plan, folder, signals, watcher.tick, started_at)
            summary = attempts.run(f"{ENGINES[plan.job.engine].worker}:main")
            if not (summary["samples_per_s"] or summary["restarts"]):
                folder.keep_job_file()  # nothing was trained: keep the job that did
        except RequestError:
            folder.remove()
            raise
        outcome = {"run_dir": str(folder.path), **summary}
        return Result(folder.path, {**outcome, "proof": None if proof is None else proof.to_data()})


def _record_start(
    folder: RunFolder,
    resolved: Resolved,
    plan: LaunchPlan,
    changes: dict[str, list[Any]],
    hash_seed: str,
    proof: EqualityProof | None,
) -> None:
    """Write the resolved job, and the conditions under which it starts."""
    job = dataclasses.replace(plan.job, task=plan.shape.fields)
    folder.write_job(Resolved(job, resolved.sources), "" if proof is None else str(proof))
    if proof is not None:
        folder.events.event("proof", **proof.to_data())
    if plan.decision is not None:
        folder.events.event("chosen", **plan.decision.to_data())
    folder.events.event(
        "started",
        ranks=plan.job.ranks,
        notes=list(plan.notes),
        changes=changes,
        environment=recorded_environment(hash_seed),
    )


def recorded_environment(hash_seed: str) -> dict[str, str]:
    """The variables that describe how a job was run; others may be private: not recorded."""
    environment = {**os.environ, HASH_SEED: hash_seed}
    names = [name for name in sorted(environment) if name in RECORDED or name.startswith(SETTINGS)]
    return redacted({name: environment[name] for name in names})


def _changes(resolved: Resolved, plan: LaunchPlan) -> dict[str, list[Any]]:
    """What differs from the run that this job resumes; raises for what must not differ."""
    if resolved.base is None:
        return {}
    fields = changed_fields(resolved.base, plan.shape.fields)
    return {**changed(resolved.base, plan.job), **fields}


def _resumes(resolved: Resolved) -> bool:
    """Whether this job goes on in an existing run folder.

    A folder whose run is done and has no checkpoint is refused like any other existing folder.
    """
    base = resolved.base
    if base is None or not base.resumes:
        return False
    events = [row["event"] for row in read_rows(base.path / "events.jsonl")]
    return "done" not in events[-1:] or bool(committed(base.path / CHECKPOINTS))


def new_run_dir(program: str) -> str:
    """A new name under `runs/`: the program, the time, this process, and which run of it."""
    name = Path(program.partition(":")[0]).stem or "run"
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    return f"runs/{safe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_runs)}"
