"""Row A5: what a site cannot give is refused, with the site's own number and the option to change."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.launcher.slurm.commands import parse_site_facts
from allranks.launcher.slurm.limits import check_device, check_request, slurm_time
from allranks.launcher.slurm.request import SlurmOptions, make_request
from allranks.launcher.slurm.site import Site, load_site

LIVE = parse_site_facts(
    "ClusterName = here\nAccountingStorageEnforce = associations,limits\n"
    "SelectTypeParameters = CR_CORE_MEMORY\n",
    "PartitionName=debug Default=YES MaxTime=01:00:00 MaxNodes=UNLIMITED Nodes=n[1-2]\n"
    "PartitionName=short MaxTime=00:02:00 MaxNodes=1 Nodes=n1\n",
    "NodeName=n1 CPUTot=4 RealMemory=2000 ThreadsPerCore=1 Gres=(null)\n"
    "NodeName=n2 CPUTot=4 RealMemory=2000 ThreadsPerCore=1 Gres=(null)\n",
    as_of="2026-01-01",
)
PUHTI, MINE = {"partition": "gpu", "account": "p"}, {"account": "p"}


def check(site: Site | str, **asked: Any) -> None:
    found = load_site(site) if isinstance(site, str) else site
    given = SlurmOptions(**{"name": "job", **asked})
    request = make_request(found, given, command=(), folder="/w", run_dir="/w/r")
    check_request(found, given, request)


@pytest.mark.parametrize(
    ("site", "asked", "number", "change"),
    [
        # memory: one flag, in the site's way, and no more than there is
        ("puhti", PUHTI | {"mem": 1000, "mem_per_gpu": 500}, "uses --mem", "keep one of them: --mem 1000"),
        ("puhti", PUHTI | {"mem_per_cpu": 500}, "--mem", "--mem in the place of --mem-per-cpu"),
        ("puhti", PUHTI | {"mem": 400_000}, "381952 MB on a node", "--mem 381952"),
        ("template", {"account": "p", "partition": "cpu", "mem_per_cpu": 4000, "cpus_per_task": 100}, "254000 MB on a node", "--mem-per-cpu 2540"),
        ("roihu", {"account": "p", "partition": "gpumedium", "mem": 1000}, "memory comes with the CPUs and GPUs", "leave --mem out"),
        (LIVE, MINE | {"mem": 2001}, "2000 MB on a node", "--mem 2000"),
        # tasks and GPUs
        ("puhti", PUHTI | {"ranks_per_node": 2, "gpus_per_node": 4}, "a node of gpu of Puhti (CSC) has 4", "--ranks-per-node 4, or --gpus-per-node 2"),
        ("puhti", PUHTI | {"ranks_per_node": 4, "gpus_per_node": 4, "devices_per_rank": 2}, "2 GPUs each", "--ranks-per-node 2, or --gpus-per-node 8"),
        ("puhti", PUHTI | {"gpus_per_node": 5}, "4 GPUs on a node", "--gpus-per-node 4"),
        ("puhti", {"account": "p", "partition": "small", "gpus_per_node": 1}, "0 GPUs on a node", "--partition gputest"),
        ("mahti", {"account": "p", "partition": "gpusmall", "gpus_per_node": 3}, "2 GPUs for a job", "--gpus-per-node 2"),
        ("roihu", {"account": "p", "partition": "gpumedium", "nodes": 2}, "4 GPUs for a job", "--gpus-per-node 2"),
        ("puhti", PUHTI | {"ranks_per_node": 8}, "4 GPUs on a node", "--ranks-per-node 4"),
        (LIVE, MINE | {"gpus_per_node": 1}, "0 GPUs on a node", "leave --gpus-per-node out"),
        # CPUs
        ("puhti", PUHTI | {"cpus_per_task": 11}, "40 CPUs on a node", "--cpus-per-task 10"),
        ("taurus-gpu2", {"gpus_per_node": 1, "cpus_per_task": 7}, "6 CPUs for each GPU", "--cpus-per-task 6"),
        ("taurus-ml", {"cpus_per_task": 30}, "176 CPUs on a node", "--cpus-per-task 29"),
        (LIVE, MINE | {"ranks_per_node": 5}, "4 CPUs on a node", "--ranks-per-node 4"),
        (LIVE, MINE | {"ranks_per_node": 2, "cpus_per_task": 3}, "4 CPUs on a node", "--cpus-per-task 2"),
        # nodes
        ("puhti", PUHTI | {"nodes": 21}, "20 nodes for a job", "--nodes 20"),  # `large` has no GPUs
        ("mahti", {"account": "p", "partition": "gpusmall", "nodes": 2, "gpus_per_node": 2}, "1 node for a job", "--nodes 1, or --partition gpumedium"),
        ("mahti", {"account": "p", "partition": "large", "nodes": 2}, "at least 20 nodes", "--nodes 20"),
        (LIVE, MINE | {"nodes": 3}, "2 nodes for a job", "--nodes 2"),
        (LIVE, MINE | {"nodes": 2, "partition": "short"}, "1 node for a job", "--nodes 1, or --partition debug"),
        # time
        ("puhti", PUHTI | {"time_s": 3 * 86_400 + 1}, "at most 3-00:00:00", "--time 3-00:00:00, or --partition longrun"),
        ("taurus-ml", {"time_s": 8 * 86_400}, "at most 7-00:00:00", "--time 7-00:00:00"),
        (LIVE, MINE | {"time_s": 121, "partition": "short"}, "at most 00:02:00", "--time 00:02:00, or --partition debug"),
        (LIVE, MINE | {"time_s": 59}, "Slurm, which counts minutes", "--time 1, or longer: a plain number is minutes, as for sbatch"),
        (LIVE, MINE | {"time_s": 120, "signal_s": 120}, "a job of 00:02:00", "--signal 60"),
        (LIVE, MINE | {"signal_s": 65_536}, "65535 at most", "--signal 32767"),
        # account and partition
        ("puhti", {"partition": "gpu"}, "Puhti (CSC) charges every job to a project", "--account PROJECT"),
        ("puhti", {"account": "p", "partition": "cpu"}, "Puhti (CSC) has test, small,", "known: gpu, gputest"),
        (LIVE, MINE | {"partition": "gpu"}, "cluster here has debug, short", "known: debug, short"),
    ],
)  # fmt: skip
def test_what_a_site_cannot_give_is_refused(
    site: Site | str, asked: dict[str, Any], number: str, change: str
) -> None:
    with pytest.raises(RequestError) as refused:
        check(site, **asked)
    assert number in refused.value.found
    assert change in refused.value.do
    assert all(refused.value.to_data().values())


@pytest.mark.parametrize(
    ("site", "asked"),
    [
        ("puhti", PUHTI | {"nodes": 20, "time_s": 3 * 86_400, "mem": 381_952, "cpus_per_task": 10}),
        ("puhti", PUHTI | {"ranks_per_node": 2, "devices_per_rank": 2}),
        ("mahti", {"account": "p", "partition": "large", "nodes": 200}),
        ("roihu", {"account": "p", "partition": "gpumedium", "nodes": 2, "gpus_per_node": 2}),
        ("roihu", {"account": "p", "partition": "gpularge", "nodes": 10}),
        ("lumi", {"account": "p", "partition": "standard-g", "nodes": 1024}),
        ("taurus-ml", {}),
        ("taurus-gpu2", {"nodes": 59}),
        (LIVE, MINE | {"nodes": 2, "ranks_per_node": 2, "cpus_per_task": 2, "mem": 2000}),
        (LIVE, MINE | {"nodes": 2, "ranks_per_node": 2, "time_s": 3600}),
        (LIVE, MINE | {"signal_s": 65_535}),
        (LIVE, MINE | {"time_s": 120, "signal_s": 119}),
    ],
)
def test_what_a_site_can_give_is_taken(site: Site | str, asked: dict[str, Any]) -> None:
    check(site, **asked)


def test_what_is_not_known_is_not_checked() -> None:
    facts = "ClusterName = here\n"
    bare = parse_site_facts(facts, "PartitionName=p Nodes=(null) Default=YES\n", "", as_of="x")
    check(bare, nodes=1000, ranks_per_node=999, mem=10**9, time_s=10**8, gpus_per_node=999)


def test_gpus_are_not_left_idle_and_not_missed() -> None:
    site = load_site("puhti")
    asked = SlurmOptions(**(PUHTI | {"name": "job"}))  # type: ignore[arg-type]
    request = make_request(site, asked, command=(), folder="/w", run_dir="/w/r")
    check_device(site, request, "cuda")
    check_device(site, request, "")
    with pytest.raises(RequestError, match="the GPUs would be idle") as refused:
        check_device(site, request, "cpu")
    assert refused.value.do == "--device cuda after the words of train, or --partition test"
    asked = SlurmOptions(partition="small", account="p", name="job")
    request = make_request(site, asked, command=(), folder="/w", run_dir="/w/r")
    check_device(site, request, "cpu")
    with pytest.raises(RequestError, match="the ranks would find none"):
        check_device(site, request, "cuda")


def test_times_are_written_as_slurm_reads_them() -> None:
    assert slurm_time(900) == "00:15:00"
    assert slurm_time(90_061) == "1-01:01:01"


def test_a_container_sees_the_gpus_that_are_paid_for() -> None:
    """A profile that does not say how a container is entered still gives it the GPUs."""
    for gpus, words in (
        (1, ("apptainer", "exec", "--nv", "my.sif")),
        (0, ("apptainer", "exec", "my.sif")),
    ):
        given = SlurmOptions(name="job", gpus_per_node=gpus, container="my.sif")
        request = make_request(LIVE, given, command=(), folder="/w", run_dir="/w/r")
        assert request.container == words
