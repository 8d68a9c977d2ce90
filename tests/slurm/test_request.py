"""What a request comes to: the share of the node, and all that is left to the site."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.launcher.slurm.request import (
    SlurmOptions,
    SlurmRequest,
    make_request,
    parse_memory_mb,
)
from allranks.launcher.slurm.site import Partition, Site, load_site

GPU = Partition("gpu", cpus=64, memory_mb=254_000, memory_share_mb=250_000, gpus=4)
CPU = Partition("cpu", cpus=64, memory_mb=254_000, memory_share_mb=250_000, gpus=0)
SITE = Site("x", "X", {"gpu": GPU, "cpu": CPU})


def request(site: Site | str, **asked: object) -> SlurmRequest:
    found = load_site(site) if isinstance(site, str) else site
    given = SlurmOptions(**{"name": "job", **asked})  # type: ignore[arg-type]
    return make_request(found, given, command=(), folder="/w", run_dir="/w/r")


def share(site: str, **asked: object) -> tuple[int, int, str, int]:
    made = request(site, **asked)
    return made.ranks_per_node, made.cpus_per_task, made.memory_flag, made.memory_mb


def test_all_gpus_of_taurus_come_out_as_its_users_write_them() -> None:
    """Row A6: --mem=250000 --cpus-per-task=7 on ml, --mem=60000 --cpus-per-task=6 on gpu2."""
    assert share("taurus-ml") == (6, 7, "mem", 250_000)
    assert share("taurus-gpu2") == (4, 6, "mem", 60_000)
    assert share("taurus-alpha") == (8, 6, "mem", 990_000)


def test_some_gpus_get_their_share_of_cpus_and_memory() -> None:
    assert share("taurus-ml", gpus_per_node=3) == (3, 7, "mem", 125_000)
    assert share("taurus-ml", ranks_per_node=1) == (1, 7, "mem", 41_666)
    assert share("taurus-gpu2", gpus_per_node=1) == (1, 6, "mem", 15_000)
    assert share("taurus-gpu2", gpus_per_node=2) == (2, 6, "mem", 30_000)
    assert share("puhti", partition="gpu", gpus_per_node=2) == (2, 10, "mem", 163_840)
    assert share("lumi", partition="small-g", gpus_per_node=2) == (2, 7, "mem", 122_880)


def test_where_memory_comes_with_the_gpus_none_is_asked_for() -> None:
    assert share("roihu", partition="gpumedium") == (4, 72, "none", 0)
    assert share("mahti", partition="gpusmall") == (2, 32, "none", 0)


def test_ranks_with_several_devices_share_their_cpus() -> None:
    """`dp` drives many devices from one process: that gets the CPUs of all of them."""
    made = request("taurus-ml", devices_per_rank=6)
    assert (made.ranks_per_node, made.gpus_per_node, made.cpus_per_task) == (1, 6, 42)
    made = request("taurus-ml", devices_per_rank=2, ranks_per_node=2)
    assert (made.gpus_per_node, made.cpus_per_task, made.memory_mb) == (4, 14, 166_666)


@given(gpus=st.integers(1, 4), nodes=st.integers(1, 9), flag=st.sampled_from(["mem", "mem-per-cpu", "mem-per-gpu"]))  # fmt: skip
def test_no_share_is_more_than_the_part_of_the_node(gpus: int, nodes: int, flag: str) -> None:
    site = dataclasses.replace(SITE, memory_flag=flag)
    made = request(site, partition="gpu", gpus_per_node=gpus, nodes=nodes)
    assert made.memory_flag == flag
    assert made.memory_per_node_mb is not None
    whole = GPU.memory_share_mb or 0
    assert 0 <= whole * gpus / 4 - made.memory_per_node_mb < made.cpus_per_node + gpus + 1
    assert made.cpus_per_node * 4 <= 64 * gpus
    assert made.ranks == nodes * gpus


def test_without_gpus_the_cpus_decide_the_share() -> None:
    assert request(SITE, partition="cpu", ranks_per_node=2, cpus_per_task=16).memory_mb == 125_000
    one = request(SITE, partition="cpu")
    assert (one.ranks_per_node, one.cpus_per_task, one.memory_mb) == (1, 1, 250_000 // 64)
    whole = dataclasses.replace(CPU, whole_nodes=True)
    alone = request(Site("x", "X", {"cpu": whole}), partition="cpu", ranks_per_node=3)
    assert (alone.cpus_per_task, alone.memory_mb) == (21, 250_000)


def test_what_is_not_known_is_not_asked_for() -> None:
    bare = Site("x", "X", {"p": Partition("p")}, default_partition="p")
    made = request(bare, ranks_per_node=2)
    assert (made.cpus_per_task, made.gpus_per_node, made.gpu_line) == (1, 0, "")
    assert (made.memory_flag, made.time_s) == ("none", None)


def test_what_is_said_goes_before_the_share() -> None:
    made = request("taurus-ml", gpus_per_node=6, cpus_per_task=2, mem=1000)
    assert (made.cpus_per_task, made.memory_flag, made.memory_mb) == (2, "mem", 1000)
    assert request("puhti", partition="gpu", gpus_per_node=0).gpu_line == ""


def test_two_flags_of_memory_are_refused() -> None:
    with pytest.raises(RequestError) as refused:
        request("puhti", partition="small", mem=4000, mem_per_cpu=1000)
    assert refused.value.asked == "--mem 4000 --mem-per-cpu 1000"
    assert "Puhti (CSC) uses --mem" in refused.value.found
    assert refused.value.do == "keep one of them: --mem 4000"
    with pytest.raises(RequestError, match="keep one of them: --mem-per-cpu 5"):
        request("template", partition="cpu", mem_per_gpu=7, mem_per_cpu=5)


@pytest.mark.parametrize(
    ("time_s", "asked", "signal_s"),
    [(None, None, 120), (7200, None, 120), (120, None, 30), (7200, 300, 300), (7200, 0, 0)],
)
def test_the_signal_comes_in_time(time_s: int | None, asked: int | None, signal_s: int) -> None:
    assert request("taurus-ml", time_s=time_s, signal_s=asked).signal_s == signal_s


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("250000", 250_000),
        ("64G", 65_536),
        ("64g", 65_536),
        ("64GB", 65_536),
        ("512M", 512),
        ("2T", 2_097_152),
        ("4096K", 4),
        ("100K", None),
        ("0", None),
        ("-1", None),
        ("1.5G", None),
        ("all", None),
        ("", None),
    ],
)
def test_memory_is_read_as_slurm_reads_it(text: str, megabytes: int | None) -> None:
    assert parse_memory_mb(text) == megabytes
