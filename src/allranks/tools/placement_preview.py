"""Previews what every rank of a plan holds, by setting all ranks up without training.

Used by `train --dry-run --placement`. The ranks join, build the model and create the optimizer, in
a temporary folder.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from allranks.catalog import ENGINES
from allranks.errors import Interrupted, PlaceError, RequestError
from allranks.job.place import RankPlacement, read_placements
from allranks.job.run_folder import rank_log_path
from allranks.launcher.fault_report import first_fault, user_error
from allranks.launcher.plan import STORE, LaunchPlan, RankPlan
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise


def place_ranks(plan: LaunchPlan, server: ForkServer) -> list[RankPlacement]:
    """What each rank holds; raises the errors of a job whose ranks cannot be set up."""
    if not plan.process_set.are_all_trainers:
        raise RequestError(
            asked=f"--placement with --strategy {plan.job.strategy}",
            found=str(plan.process_set),
            why="ranks are asked what they hold, and here servers hold it, which only serve",
            do="leave --placement out: "
            "a run writes which server has what into placement/ of its folder",
        )
    with scratch_folder() as scratch:
        run_dir = Path(scratch)
        (run_dir / "logs").mkdir()
        ended = supervise(server, [_process(plan, rank, run_dir) for rank in plan.ranks])
        if ended.interrupted:
            raise Interrupted("interrupted while the ranks were set up; nothing was trained")
        fault = first_fault(ended, run_dir)
        if fault is not None:
            raise user_error(fault, ended, run_dir)
        placements = read_placements(run_dir, plan.job.ranks)
    if len(placements) < plan.job.ranks:
        raise PlaceError(f"{plan.job.ranks} ranks ended well, {len(placements)} wrote placements")
    return placements


def _process(plan: LaunchPlan, rank: RankPlan, run_dir: Path) -> Process:
    job = dataclasses.replace(plan.job, run_dir=str(run_dir))
    store = str(run_dir / STORE) if rank.world.store else ""
    world = dataclasses.replace(rank.world, store=store)
    environment = {**rank.environment, **world.variables()}
    log = rank_log_path(run_dir, world.rank)
    target = f"{ENGINES[job.engine].worker}:place"
    argument = job.to_data()
    return Process(world.rank, target, argument, environment, log, defaults=rank.defaults)
