"""`allranks submit` against what a real Slurm says it has: what it refuses, and what it lets pass.

Each refusal has a number that Slurm gave, and the words that would do; and nothing is left of it,
neither a job nor a file. What is at the limit passes, and Slurm itself agrees.
"""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from slurm_here import NODES, SlurmHere

TRAIN = ("--", "train", "digits")
REFUSED = {
    "two families of memory": (
        ("--mem=1G", "--mem-per-cpu=100M"),
        ("2 ways to ask for one memory", "keep one of them: --mem 1024"),
    ),
    "memory of a GPU, and of a node": (
        ("--partition=gpu", "--mem=1G", "--mem-per-gpu=1G"),
        ("2 ways to ask for one memory", "keep one of them: --mem 1024"),
    ),
    "tasks are not GPUs": (
        ("--partition=gpu", "--ranks-per-node=1", "--gpus-per-node=2"),
        ("a node of gpu of cluster rehearsal has 2", "--ranks-per-node 2"),
    ),
    "too many GPUs": (
        ("--partition=gpu", "--gpus-per-node=3"),
        ("2 GPUs on a node", "--gpus-per-node 2"),
    ),
    "GPUs where there are none": (
        ("--gpus-per-node=1",),
        ("0 GPUs on a node", "--partition gpu"),
    ),
    "too many CPUs": (
        ("--ranks-per-node=2", "--cpus-per-task=3"),
        ("4 CPUs on a node", "--cpus-per-task 2"),
    ),
    "too many ranks": (("--ranks-per-node=5",), ("4 CPUs on a node", "--ranks-per-node 4")),
    "too much memory": (("--mem=4001",), ("4000 MB on a node", "--mem 4000")),
    "too many nodes": (("--nodes=3",), ("2 nodes for a job", "--nodes 2")),
    "too many nodes for the partition": (
        ("--nodes=2", "--partition=short"),
        ("1 node for a job", "--nodes 1, or --partition debug"),
    ),
    "over the time limit": (
        ("--time=2h",),
        ("partition debug of cluster rehearsal: at most 01:00:00", "--time 01:00:00"),
    ),
    "over the time limit of the partition": (
        ("--time=3m", "--partition=short"),
        ("at most 00:02:00", "--time 00:02:00, or --partition debug"),
    ),
    "no such partition": (("--partition=shorts",), ("debug", "short", "gpu")),
}
AT_THE_LIMIT = {
    "a whole node": ("--ranks-per-node=2", "--cpus-per-task=2", "--mem=4000", "--time=1h"),
    "all nodes": ("--nodes=2", "--ranks-per-node=4"),
    "the short partition": ("--partition=short", "--time=2m", "--ranks-per-node=4"),
}


def _submit(slurm: SlurmHere, *words: str) -> subprocess.CompletedProcess[str]:
    return slurm.run("allranks", "submit", *words)


@pytest.mark.parametrize("case", REFUSED)
def test_what_this_slurm_cannot_give_is_refused(slurm: SlurmHere, case: str) -> None:
    words, said = REFUSED[case]
    done = _submit(slurm, *words, *TRAIN)
    assert done.returncode == 2, done
    for part in said:
        assert part in done.stderr
    assert slurm.ask("squeue", "--noheader") == ""
    assert list(slurm.work.iterdir()) == []


@pytest.mark.parametrize("case", AT_THE_LIMIT)
def test_what_is_at_the_limit_passes_here_and_there(slurm: SlurmHere, case: str) -> None:
    words = AT_THE_LIMIT[case]
    text = _submit(slurm, *words, "--dry-run", *TRAIN)
    assert text.returncode == 0, text
    assert list(slurm.work.iterdir()) == []
    script = slurm.work / "script.sh"
    script.write_text(text.stdout)
    slurm.ask("sbatch", "--test-only", str(script))


def test_a_site_as_it_was_discovered_refuses_a_job_without_an_account(slurm: SlurmHere) -> None:
    """A Slurm without a data base never asks for one; its profile,
    when a person has said so, does."""
    profile = slurm.ask("allranks", "cluster", "discover")
    found = tomllib.loads(profile)
    assert found["account_required"] is False
    assert found["partitions"]["debug"]["max_nodes"] == len(NODES)
    path = slurm.work / "site.toml"
    path.write_text(profile.replace("account_required = false", "account_required = true"))
    cluster = f"--cluster={path}"
    refused = _submit(slurm, cluster, "--dry-run", *TRAIN)
    assert refused.returncode == 2
    assert "--account PROJECT" in refused.stderr
    passed = _submit(slurm, cluster, "--account=project_1", "--dry-run", *TRAIN)
    assert passed.returncode == 0, passed
    assert "#SBATCH --account=project_1" in passed.stdout


def test_a_slurm_that_does_not_answer_is_not_the_fault_of_the_request(slurm: SlurmHere) -> None:
    broken = slurm.work / "slurm.conf"
    configuration = (slurm.folder / "slurm.conf").read_text()
    broken.write_text(configuration.replace("SlurmctldHost=head(10.77.0.1)", "SlurmctldHost=n1"))
    done = slurm.run("allranks", "submit", *TRAIN, env={"SLURM_CONF": str(broken)})
    assert done.returncode == 3, done
    assert "Slurm refused `scontrol show config`" in done.stderr
