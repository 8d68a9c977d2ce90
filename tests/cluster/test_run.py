"""Unchanged scripts of torch on a real Slurm, one process on each of two nodes."""

from __future__ import annotations

import json

import pytest

from allranks.job.run_folder import read_events
from script_table import SCRIPTS, Script, check_output
from slurm_here import ENDED, SlurmHere

ON_TORCH = [script for script in SCRIPTS if script.on_torch]


@pytest.mark.parametrize("script", ON_TORCH, ids=lambda script: script.name)
def test_a_script_runs_unchanged(slurm: SlurmHere, script: Script) -> None:
    where = ("--nodes=2", "--ranks-per-node=1", "--time=10m", "--run-dir=run", "--json")
    words = ["allranks", "submit", *where, "--", "run", "--show", "all", *script.words]
    job = str(json.loads(slurm.ask(*words).splitlines()[-1])["job_id"])
    slurm.wait_for(lambda: slurm.state_of(job) in ENDED, 240, f"the end of job {job}")
    if script.has_died_at_exit(slurm.output_of(job)):
        words = ["--run-dir=again" if one == "--run-dir=run" else one for one in words]
        job = str(json.loads(slurm.ask(*words).splitlines()[-1])["job_id"])
    slurm.wait_for_state(job, "COMPLETED", timeout_s=240)
    check_output(script, slurm.output_of(job), {0: "n1", 1: "n2"})
    slurm.wait_until_idle()


def test_a_script_that_asks_slurm_who_it_is_hears_of_itself(slurm: SlurmHere) -> None:
    """Not of the agent that started it, which is one task for all ranks of its node."""
    names = ("PROCID", "LOCALID", "NODEID", "NTASKS", "STEP_TASKS_PER_NODE")
    script = slurm.work / "who.py"
    script.write_text(
        f"import os\nprint(*(os.environ['SLURM_' + n] for n in {names}), os.environ['RANK'])\n"
    )
    where = ("--nodes=2", "--ranks-per-node=2", "--run-dir=run", "--json")
    run = ("run", "--show", "all", "--", "python", str(script))
    said = slurm.ask("allranks", "submit", *where, "--", *run)
    job = str(json.loads(said.splitlines()[-1])["job_id"])
    slurm.wait_for_state(job, "COMPLETED")
    lines = [line.partition("] ")[2] for line in slurm.output_of(job).splitlines()]
    found = sorted(line for line in lines if line[:1].isdigit())
    assert found == [f"{rank} {rank % 2} {rank // 2} 4 2,2 {rank}" for rank in range(4)]


def test_a_node_that_goes_down_is_named(slurm: SlurmHere) -> None:
    script = slurm.work / "waits.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    where = ("--nodes=2", "--ranks-per-node=1", "--run-dir=run", "--json", "--sbatch=--no-kill")
    run = ("run", "--node-timeout", "4", "--show", "all", "--", "python", str(script))
    said = slurm.ask("allranks", "submit", *where, "--", *run)
    job = str(json.loads(said.splitlines()[-1])["job_id"])
    slurm.wait_for(lambda: slurm.output_of(job).count("up") == 2, 120, "both processes")
    slurm.take_down("n2")
    slurm.wait_for_state(job, "FAILED", timeout_s=240)
    (failed,) = (row for row in read_events(slurm.work / "run") if row["event"] == "failed")
    assert failed["report"].startswith("node n2 is lost, with rank 1: ")
