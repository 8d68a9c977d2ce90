"""The rules of the doctor: each finding on facts that are made up, and none on a healthy node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.launcher.nodes.facts import NodeFacts, gpus_of_driver
from allranks.tools.doctor.doctor import needed_torch
from allranks.tools.doctor.examination import SEEN, SEEN_LOCK, WORKS, Examination, Folder
from allranks.tools.doctor.probes import Endpoint, Link, matrix_of
from allranks.tools.doctor.rules import (
    NOTE,
    STOP,
    WARNING,
    Collected,
    Finding,
    NodeReport,
    findings,
    is_within,
    may_differ,
    must_be_equal,
)

GIB = 1 << 30
TORCH = "torch>=2.13"
TRIALS = (SEEN, SEEN_LOCK, "write", "fsync", "rename", "lock")
FOLDER = Folder("/shared/runs", "lustre", 900 * GIB, 10**6, dict.fromkeys(TRIALS, WORKS))
FACTS = NodeFacts(
    host="node0",
    machine="one",
    python="3.11.7",
    allranks="0.1.0",
    source="abc",
    packages={"torch": "2.13.0+cpu", "numpy": "2.4.6"},
    system="Linux 6.1 x86_64",
    processor="EPYC",
    cores=64,
    processors="0,1",
    memory_bytes=256 * GIB,
    shared_memory_bytes=128 * GIB,
    open_files=4096,
    gpus=[],
    interfaces={"ib0": "10.1.0.1"},
    clock_s=0.0,
)
SEEN_THERE = Examination(
    cores=64,
    cores_allowed=64,
    cpu_quota=None,
    memory_available_bytes=200 * GIB,
    memory_limit_bytes=None,
    shared_memory_bytes=128 * GIB,
    shared_memory_free_bytes=128 * GIB,
    open_files=4096,
    open_files_hard=4096,
    speed_mbit={"ib0": 100_000},
    folder=FOLDER,
)


def node(number: int = 0, facts: dict[str, Any] | None = None, **seen: Any) -> NodeReport:
    """A healthy node, but for these facts and this of its examination."""
    name, address = f"node{number}", f"10.1.0.{number + 1}"
    return NodeReport(
        number=number,
        name=name,
        address=address,
        interface="ib0",
        interfaces={"ib0": address},
        facts=replace(FACTS, host=name, **(facts or {})),
        examination=replace(SEEN_THERE, **seen),
        clock_offset_s=0.001,
        clock_error_s=0.0001,
    )


def folder(**changed: Any) -> dict[str, Any]:
    """An examination with another folder; `tried` is what did not work there."""
    tried = {**FOLDER.tried, **changed.pop("tried", {})}
    return {"folder": replace(FOLDER, tried=tried, **changed)}


def judged(*nodes: NodeReport, **more: Any) -> tuple[Finding, ...]:
    return findings(Collected(nodes, needs_torch=TORCH, **more))


def only(*nodes: NodeReport, **more: Any) -> Finding:
    """The one finding that there is."""
    (found,) = judged(*nodes, **more)
    assert found.do and found.found and found.subject
    return found


@pytest.mark.parametrize("count", [1, 2, 5])
def test_healthy_nodes_have_no_findings(count: int) -> None:
    assert judged(*map(node, range(count))) == ()


@pytest.mark.parametrize(
    ("level", "subject", "words", "sick"),
    [
        (STOP, "torch", "not installed", node(1, {"packages": {"numpy": "2.4.6"}})),
        (STOP, "torch", "version 2.12.1", node(1, {"packages": {"torch": "2.12.1"}})),
        (STOP, "shared memory", "no /dev/shm", node(1, shared_memory_bytes=None)),
        (WARNING, "shared memory", "64.0 MiB", node(1, shared_memory_bytes=64 << 20)),
        (
            STOP,
            "shared memory",
            "NCCL",
            node(1, {"gpus": ["H200", "H200"]}, shared_memory_bytes=64 << 20),
        ),
        (STOP, "open files", "at most 512", node(1, open_files=512)),
        (STOP, "not shared", "No such file", node(1, **folder(tried={SEEN: "No such file"}))),
        (STOP, "cannot be written", "denied", node(1, **folder(tried={"write": "denied"}))),
        (STOP, "durable", "not implemented", node(1, **folder(tried={"fsync": "not implemented"}))),
        (STOP, "replaced", "in use", node(1, **folder(tried={"rename": "in use"}))),
        (STOP, "locked", "not implemented", node(1, **folder(tried={"lock": "not implemented"}))),
        (WARNING, "one node only", "not seen", node(1, **folder(tried={SEEN_LOCK: "not seen"}))),
        (WARNING, "little space", "512.0 MiB", node(1, **folder(free_bytes=512 << 20))),
        (STOP, "little space", "1.0 MiB", node(1, **folder(free_bytes=1 << 20))),
        (WARNING, "few files", "12 more", node(1, **folder(free_files=12))),
        (NOTE, "cores", "8 of 64", node(1, cores_allowed=8)),
        (WARNING, "time of processors", "1.5 cores", node(1, cpu_quota=1.5)),
        (NOTE, "memory", "16.0 GiB, of 256.0 GiB", node(1, memory_limit_bytes=16 * GIB)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_node_is_found_and_only_that(
    level: str, subject: str, words: str, sick: NodeReport
) -> None:
    found = [one for one in judged(node(0), sick) if one.subject != "the nodes differ"]
    own = [one for one in found if one.node == "node1"]
    assert len(own) == 1 and (own[0].level, own[0].node) == (level, "node1")
    assert subject in own[0].subject and words in own[0].found and own[0].do
    assert all(one.subject == "the nodes are not alike" for one in found if one not in own)


def test_a_folder_that_counts_no_files_and_one_that_is_unknown_are_no_findings() -> None:
    assert judged(node(0, **folder(free_files=0))) == ()
    assert judged(node(0, **folder(free_bytes=None, free_files=None, kind=None))) == ()


def test_where_another_folder_is_seen_its_own_faults_are_not_told() -> None:
    tried = dict.fromkeys((SEEN, SEEN_LOCK, "write"), "No such file or directory")
    sick = node(1, **folder(tried=tried))
    assert "not shared" in only(node(0), sick).subject


def test_of_few_open_files_the_hard_limit_is_told() -> None:
    do = only(node(0, open_files=512, open_files_hard=1000)).do
    assert "ulimit -n" in do and "hard limit of 1000" in do


def test_no_interface_stops_several_nodes_and_not_one() -> None:
    alone = replace(node(1), interfaces={})
    found = only(node(0), alone)
    assert (found.level, found.subject, found.node) == (STOP, "network interface", "node1")
    assert judged(replace(node(0), interfaces={})) == ()


@pytest.mark.parametrize(
    ("offset_s", "error_s", "words"),
    [
        (2.5, 0.001, "2.5 s ahead"),
        (-90.0, 0.1, "90.0 s behind"),
        (1.05, 0.2, None),
        (0.9, 0.0, None),
        (None, None, None),
    ],
)
def test_a_clock_that_is_surely_more_than_a_second_off_is_a_warning(
    offset_s: float | None, error_s: float | None, words: str | None
) -> None:
    off = replace(node(1), clock_offset_s=offset_s, clock_error_s=error_s)
    if words is None:
        assert judged(node(0), off) == ()
    else:
        found = only(node(0), off)
        assert found.level == WARNING and words in found.found


@pytest.mark.parametrize(
    ("left_s", "level"), [(5.0, STOP), (-3.0, STOP), (300.0, WARNING), (3600.0, ""), (None, "")]
)
def test_a_time_limit_that_is_nearly_over(left_s: float | None, level: str) -> None:
    found = judged(node(0), time_left_s=left_s)
    assert [one.level for one in found] == ([level] if level else [])


def test_a_lost_node_and_a_broken_way_stop_a_run() -> None:
    lost = only(node(0), node(1), lost={"node1": "it did not answer for 60 s"})
    assert (lost.level, lost.node) == (STOP, "node1")
    broken = only(node(0), node(1), broken=("rank 0 on node0 to rank 1 on node1: timed out",))
    assert broken.level == STOP and "--interface" in broken.do


def test_a_way_that_is_much_slower_than_the_others_is_named() -> None:
    ends = [Endpoint(rank, f"node{rank}", f"10.1.0.{rank}") for rank in range(3)]
    ways = {(i, j): Link(50.0, 1000.0) for i in range(3) for j in range(3) if i != j}
    nodes = [node(number) for number in range(3)]
    assert judged(*nodes, matrix=matrix_of(ends, ways)) == ()
    found = only(*nodes, matrix=matrix_of(ends, {**ways, (2, 1): Link(50.0, 90.0)}))
    assert found.level == WARNING and found.found.startswith("node2 to node1: 90 MB/s")


def test_ways_on_one_node_are_not_compared_with_those_between_nodes() -> None:
    ends = [Endpoint(rank, f"node{rank // 2}", "x") for rank in range(4)]
    same = {(0, 1), (1, 0), (2, 3), (3, 2)}
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    ways = {pair: Link(9.0, 5000.0 if pair in same else 12.0) for pair in pairs}
    assert judged(node(0), node(1), matrix=matrix_of(ends, ways)) == ()


def test_what_must_be_equal_stops_and_what_may_differ_is_a_note() -> None:
    other = node(
        1,
        {
            "python": "3.12.1",
            "processor": "Xeon",
            "cores": 32,
            "packages": {"torch": "2.13.1", "numpy": "2.0.0"},
        },
    )
    nodes = (node(0), other)
    equal, differ = must_be_equal(nodes), may_differ(nodes)
    assert [line.partition(":")[0] for line in equal] == ["python", "torch"]
    assert "torch: node0 has 2.13.0+cpu, node1 has 2.13.1" in equal
    assert [line.partition(":")[0] for line in differ] == ["processor", "cores", "packages"]
    assert "packages: node0 has numpy 2.4.6, node1 has numpy 2.0.0" in differ
    found = judged(*nodes)
    assert [one.level for one in found] == [STOP, STOP, NOTE, NOTE, NOTE]
    assert "--bitwise" in next(one for one in found if "EPYC" in one.found).do


def test_the_worst_comes_first() -> None:
    sick = node(1, open_files=1, cores_allowed=2, cpu_quota=0.5)
    levels = [one.level for one in judged(node(0), sick)]
    assert levels == [STOP, WARNING, NOTE]


def test_a_node_that_nobody_could_look_at_is_judged_by_its_facts() -> None:
    dark = replace(node(1, {"packages": {}}), examination=None, clock_offset_s=None)
    subjects = {one.subject for one in judged(node(0), dark)}
    assert "torch" in subjects


@pytest.mark.parametrize(
    ("version", "requirement", "met"),
    [
        ("2.13.0", TORCH, True),
        ("2.13.5+cu130", TORCH, True),
        ("2.13", TORCH, True),
        ("2.12.9", TORCH, False),
        ("2.14.0a0+git", TORCH, True),
        ("10.0", "torch>=9", True),
        ("unknown", TORCH, True),
        ("1.0", "torch", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, requirement: str, met: bool) -> None:
    assert is_within(version, requirement) is met


def test_the_range_of_torch_is_that_of_this_package() -> None:
    needed = needed_torch()
    assert needed is not None and needed.startswith("torch") and ">=2." in needed


def test_gpus_are_counted_without_what_their_driver_tells(tmp_path: Path) -> None:
    """A container may show device files alone."""
    assert gpus_of_driver(tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert gpus_of_driver(tmp_path) == ["unknown"] * 2
    told = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    told.mkdir(parents=True)
    (told / "information").write_text("Model: \t\t NVIDIA L4\n")
    assert gpus_of_driver(tmp_path) == ["NVIDIA L4"]
