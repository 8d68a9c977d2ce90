"""The rules of the doctor: each finding on facts that are made up, and none on a healthy node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.launcher.nodes.facts import NodeFacts, gpus_of_driver
from allranks.tools.doctor.folder import LOCK, SEEN, WORKS, WRITE, Folder
from allranks.tools.doctor.rules import (
    NOTE,
    STOP,
    WARNING,
    Finding,
    NodeReport,
    findings,
    may_differ,
    must_be_equal,
)

GIB = 1 << 30
FOLDER = Folder("/shared/runs", "lustre", 900 * GIB, dict.fromkeys((SEEN, WRITE, LOCK), WORKS))
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


def node(number: int = 0, tried: dict[str, str] | None = None, **changed: Any) -> NodeReport:
    """A healthy node, but for these facts, this of its folder and what did not work there."""
    name, address = f"node{number}", f"10.1.0.{number + 1}"
    free = {"free_bytes": changed.pop("free_bytes")} if "free_bytes" in changed else {}
    return NodeReport(
        number=number,
        name=name,
        address=address,
        interface="ib0",
        interfaces={"ib0": address},
        facts=replace(FACTS, host=name, **changed),
        folder=replace(FOLDER, tried={**FOLDER.tried, **(tried or {})}, **free),
    )


def only(*nodes: NodeReport, **more: Any) -> Finding:
    """The one finding that there is."""
    (found,) = findings(nodes, **more)
    assert found.do and found.found and found.subject
    return found


@pytest.mark.parametrize("count", [1, 2, 5])
def test_healthy_nodes_have_no_findings(count: int) -> None:
    assert findings([*map(node, range(count))]) == ()


@pytest.mark.parametrize(
    ("level", "subject", "words", "sick"),
    [
        (STOP, "torch", "not installed", node(1, packages={"numpy": "2.4.6"})),
        (STOP, "shared memory", "no /dev/shm", node(1, shared_memory_bytes=None)),
        (WARNING, "shared memory", "64.0 MiB", node(1, shared_memory_bytes=64 << 20)),
        (STOP, "shared memory", "NCCL", node(1, gpus=["L4"] * 2, shared_memory_bytes=64 << 20)),
        (STOP, "open files", "at most 512", node(1, open_files=512)),
        (STOP, "not shared", "No such file", node(1, {SEEN: "No such file"})),
        (STOP, "cannot be written", "denied", node(1, {WRITE: "denied"})),
        (STOP, "locked", "not implemented", node(1, {LOCK: "not implemented"})),
        (WARNING, "little space", "512.0 MiB", node(1, free_bytes=512 << 20)),
        (STOP, "little space", "1.0 MiB", node(1, free_bytes=1 << 20)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_node_is_found_and_only_that(
    level: str, subject: str, words: str, sick: NodeReport
) -> None:
    found = [one for one in findings([node(0), sick]) if one.subject != "the nodes differ"]
    own = [one for one in found if one.node == "node1"]
    assert len(own) == 1 and (own[0].level, own[0].node) == (level, "node1")
    assert subject in own[0].subject and words in own[0].found and own[0].do
    assert all(one.subject == "the nodes are not alike" for one in found if one not in own)


def test_a_folder_whose_space_is_unknown_is_no_finding() -> None:
    assert findings([node(0, free_bytes=None)]) == ()


def test_where_another_folder_is_seen_its_own_faults_are_not_told() -> None:
    tried = dict.fromkeys((SEEN, WRITE), "No such file or directory")
    assert "not shared" in only(node(0), node(1, tried)).subject


def test_a_lost_node_and_a_broken_way_stop_a_run() -> None:
    silent = replace(node(1), folder=None, lost="it did not answer for 60 s")
    lost = only(node(0), silent)
    assert (lost.level, lost.node, lost.found) == (STOP, "node1", "it did not answer for 60 s")
    broken = only(node(0), node(1), broken=("rank 0 on node0 to rank 1 on node1: timed out",))
    assert broken.level == STOP and "--interface" in broken.do


def test_what_must_be_equal_stops_and_what_may_differ_is_a_note() -> None:
    packages = {"torch": "2.13.1", "numpy": "2.0.0"}
    nodes = (node(0), node(1, python="3.12.1", processor="Xeon", cores=32, packages=packages))
    equal, differ = must_be_equal(nodes), [line for line, _ in may_differ(nodes)]
    assert [line.partition(":")[0] for line in equal] == ["python", "torch"]
    assert "torch: node0 has 2.13.0+cpu, node1 has 2.13.1" in equal
    assert [line.partition(":")[0] for line in differ] == ["processor", "cores", "packages"]
    assert "packages: node0 has numpy 2.4.6, node1 has numpy 2.0.0" in differ
    found = findings(nodes)
    assert [one.level for one in found] == [STOP, STOP, NOTE, NOTE, NOTE]
    assert "--bitwise" in next(one for one in found if "EPYC" in one.found).do


def test_the_worst_comes_first() -> None:
    sick = node(1, cores=2, open_files=1, free_bytes=512 << 20)
    assert [one.level for one in findings([node(0), sick])] == [STOP, WARNING, NOTE]


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
