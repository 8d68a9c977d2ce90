"""A site from recorded answers of Slurm, and back through the profile that is written of it."""

from __future__ import annotations

import dataclasses

import pytest

from allranks.errors import PlaceError
from allranks.launcher.slurm.commands import parse_fields, parse_site_facts, site_as_toml
from allranks.launcher.slurm.site import Partition, parse_site
from slurm_answers import CONFIG, NODES, PARTITIONS

SITE = parse_site_facts(CONFIG, PARTITIONS, NODES, as_of="2026-01-31")


def test_the_site() -> None:
    assert (SITE.name, SITE.default_partition) == ("borealis", "cpu")
    assert not SITE.account_required, "Slurm may know a user's usual account: it decides"
    assert list(SITE.partitions) == ["cpu", "gpu", "whole", "empty"]
    assert SITE.sources["scontrol"].version == "Slurm 23.11.0"


def test_nodes_count_for_what_jobs_get_of_them() -> None:
    """Not the CPUs and the memory that are held back for the system; cores, not their threads."""
    assert SITE.partitions["cpu"] == Partition(
        "cpu",
        cpus=46,
        cores=23,
        memory_mb=124_000,
        memory_share_mb=124_000,
        gpus=0,
        max_nodes=3,
        time_limit_s=3 * 86_400,
        source="scontrol",
    )


def test_the_partition_limits_its_nodes() -> None:
    gpu = SITE.partitions["gpu"]
    assert (gpu.cpus, gpu.memory_mb, gpu.max_nodes) == (40, 180_000, 2)
    assert (gpu.gpus, gpu.gpu_request) == (4, "--gres=gpu:h100:{count}")
    assert gpu.time_limit_s == 2 * 86_400


def test_what_is_without_limit_is_unknown() -> None:
    whole, empty = SITE.partitions["whole"], SITE.partitions["empty"]
    assert (whole.whole_nodes, whole.min_nodes, whole.max_nodes) == (True, 2, 2)
    assert whole.time_limit_s is None
    assert (empty.cpus, empty.memory_mb, empty.gpus, empty.max_nodes) == (None,) * 4


def test_memory_that_nobody_counts_is_not_asked_for() -> None:
    config = CONFIG.replace("CR_CORE_MEMORY", "CR_CORE")
    site = parse_site_facts(config, PARTITIONS, NODES, as_of="x")
    assert {p.memory_share_mb for p in site.partitions.values()} == {None}
    unset = NODES.replace("RealMemory=128000", "RealMemory=1").replace("MemSpecLimit=4000", "")
    assert (
        parse_site_facts(CONFIG, PARTITIONS, unset, as_of="x").partitions["cpu"].memory_mb is None
    )


def test_gpus_of_two_kinds_are_asked_for_without_a_kind() -> None:
    mixed = NODES.replace("gpu:h100:2(S:0)", "gpu:a30:2(S:0)")
    gpu = parse_site_facts(CONFIG, PARTITIONS, mixed, as_of="x").partitions["gpu"]
    assert gpu.gpu_request == "--gres=gpu:{count}"
    sliced = NODES.replace("gpu:h100:2(S:0)", "gpu:h100:2,gpu:h100_1g:7")
    gpu = parse_site_facts(CONFIG, PARTITIONS, sliced, as_of="x").partitions["gpu"]
    assert (gpu.gpus, gpu.gpu_request) == (9, "--gres=gpu:{count}")


def test_the_profile_that_is_written_says_the_same() -> None:
    text = site_as_toml(SITE)
    again = parse_site(text, "mine.toml")
    assert dataclasses.replace(again, file="") == SITE
    assert 'time_limit = "3-00:00:00"' in text


def test_names_that_toml_would_not_take_are_quoted() -> None:
    odd = PARTITIONS.replace("PartitionName=cpu", "PartitionName=a.b")
    site = parse_site_facts(CONFIG, odd, NODES, as_of="2026-01-31")
    assert next(iter(parse_site(site_as_toml(site), "x").partitions)) == "a.b"


def test_blanks_and_equal_signs_in_values_are_kept() -> None:
    fields = parse_fields(NODES.splitlines()[0])
    assert fields["OS"].startswith("Linux 6.2.0-37-generic #38~22.04.1-Ubuntu SMP")
    assert fields["CfgTRES"] == "cpu=48,mem=125G,billing=48"
    assert (fields["AllocTRES"], fields["CPUTot"]) == ("", "48")


def test_answers_that_are_none_are_a_failure_of_the_place() -> None:
    with pytest.raises(PlaceError, match="names no cluster"):
        parse_site_facts("slurm_load_ctl_conf error", "", "", as_of="x")
    broken = PARTITIONS.replace("c[1-3]", "c[1-")
    with pytest.raises(PlaceError, match="the nodes of partition cpu cannot be read"):
        parse_site_facts(CONFIG, broken, NODES, as_of="x")
