"""The symptoms that the rules of `allranks doctor` are about: where each is, and its values. Pure.

A symptom yields a pair for every place that has it: the name of the node ("" for the whole place),
and the values that the texts of its rule name.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.job.units import format_bytes
from allranks.launcher.nodes.facts import MUST_BE_EQUAL, NodeFacts, differences
from allranks.tools.doctor.diagnosis import Matrix, NodeReport
from allranks.tools.doctor.examination import SEEN, WORKS, Examination

FEWEST_FILES = 1024
SMALL_SHARED_MEMORY = 64 << 20  # what a container gets if nobody asks for more
LITTLE_SPACE, NO_SPACE = 1 << 30, 16 << 20
FEWEST_FREE_FILES = 1000
CLOCK_S = 1.0
TIME_NEARLY_OVER_S, TIME_IS_SHORT_S = 60.0, 600.0
MUCH_SLOWER = 0.5
CONDITION = re.compile(r"(==|!=|>=|<=|>|<)\s*([0-9]+(?:\.[0-9]+)*)")
LEADING_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")

Values = dict[str, Any]


@dataclass(frozen=True)
class Collected:
    """What there is to judge. `needs_torch` is the range that this version of allranks is for.

    `time_left_s` is how long Slurm leaves the job. `lost` are nodes that could not be looked at,
    and why, `broken` the links that could not be measured.
    """

    nodes: tuple[NodeReport, ...]
    needs_torch: str | None = None
    matrix: Matrix | None = None
    time_left_s: float | None = None
    lost: dict[str, str] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


Symptom = Callable[[Collected], Iterator[tuple[str, Values]]]


def of_node(look: Callable[[NodeReport, Examination], Values | None]) -> Symptom:
    """A symptom of single nodes, of those that were examined."""

    def symptom(collected: Collected) -> Iterator[tuple[str, Values]]:
        for node in collected.nodes:
            if node.examination is not None:
                values = look(node, node.examination)
                if values is not None:
                    yield node.name, values

    return symptom


# --- several nodes -----------------------------------------------------------------------------


def lost_node(collected: Collected) -> Iterator[tuple[str, Values]]:
    for node, why in collected.lost.items():
        yield node, {"why": why}


def unequal(collected: Collected) -> Iterator[tuple[str, Values]]:
    for line in must_be_equal(collected.nodes):
        yield "", {"line": line}


def differs(name: str) -> Symptom:
    """One of `MAY_DIFFER` that is not the same on all nodes."""

    def symptom(collected: Collected) -> Iterator[tuple[str, Values]]:
        values = {node.name: MAY_DIFFER[name](node.facts) for node in collected.nodes}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{node} has {value}" for node, value in values.items())
            yield "", {"line": f"{name}: {told}"}

    return symptom


def must_be_equal(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """What is not the same on all nodes, and has to be."""
    return tuple(differences({node.name: node.facts for node in nodes}))


def may_differ(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """What is not the same on all nodes and need not be, but makes itself felt."""
    collected = Collected(tuple(nodes))
    found = [values for name in MAY_DIFFER for _, values in differs(name)(collected)]
    return tuple(values["line"] for values in found)


def _packages(facts: NodeFacts) -> str:
    found = sorted(facts.packages.items())
    return ", ".join(f"{name} {version}" for name, version in found if name not in MUST_BE_EQUAL)


MAY_DIFFER: dict[str, Callable[[NodeFacts], str]] = {
    "processor": lambda facts: facts.processor or "unknown",
    "cores": lambda facts: str(facts.cores),
    "memory": lambda facts: _size(facts.memory_bytes),
    "devices": lambda facts: ", ".join(facts.gpus) or "none",
    "system": lambda facts: facts.system,
    "packages": _packages,
}


# --- torch -------------------------------------------------------------------------------------


def no_torch(collected: Collected) -> Iterator[tuple[str, Values]]:
    for node in collected.nodes:
        if "torch" not in node.facts.packages:
            yield node.name, {"wanted": collected.needs_torch or "torch"}


def torch_out_of_range(collected: Collected) -> Iterator[tuple[str, Values]]:
    wanted = collected.needs_torch
    for node in collected.nodes:
        version = node.facts.packages.get("torch")
        if version is not None and wanted is not None and not is_within(version, wanted):
            yield node.name, {"version": version, "wanted": wanted}


def is_within(version: str, requirement: str) -> bool:
    """Whether a version meets a requirement like `torch>=2.13,<2.14`; what is no such is met."""
    numbers = LEADING_NUMBERS.match(version)
    if numbers is None:
        return True
    there = [int(part) for part in numbers[0].split(".")]
    for sign, text in CONDITION.findall(requirement.partition(";")[0]):
        bound = [int(part) for part in text.split(".")]
        longest = max(len(there), len(bound))
        one, other = (part + [0] * (longest - len(part)) for part in (there, bound))
        held = {
            "==": one == other,
            "!=": one != other,
            ">=": one >= other,
            "<=": one <= other,
            ">": one > other,
            "<": one < other,
        }
        if not held[sign]:
            return False
    return True


# --- the network -------------------------------------------------------------------------------


def no_interface(collected: Collected) -> Iterator[tuple[str, Values]]:
    for node in collected.nodes:
        if len(collected.nodes) > 1 and not node.interfaces:
            yield node.name, {}


def broken_link(collected: Collected) -> Iterator[tuple[str, Values]]:
    for line in collected.broken:
        yield "", {"line": line}


def slow_link(collected: Collected) -> Iterator[tuple[str, Values]]:
    """One link between nodes that is much slower than the usual one."""
    if collected.matrix is None:
        return
    ends, rows = collected.matrix.ends, collected.matrix.mb_per_s
    between = [
        (rate, f"{ends[i].node} to {ends[j].node}")
        for i, row in enumerate(rows)
        for j, rate in enumerate(row)
        if rate is not None and ends[i].node != ends[j].node
    ]
    if len(between) < 3:
        return
    usual, (slowest, way) = statistics.median(rate for rate, _ in between), min(between)
    if slowest < MUCH_SLOWER * usual:
        yield "", {"way": way, "slowest": slowest, "usual": usual}


# --- the folder of runs ------------------------------------------------------------------------


def fails(trial: str) -> Symptom:
    """A trial in the folder of runs that failed; none where another folder is seen, or none."""

    @of_node
    def symptom(node: NodeReport, seen: Examination) -> Values | None:
        folder = seen.folder
        problem = folder.tried.get(trial, WORKS)
        if problem == WORKS or (trial != SEEN and folder.tried.get(SEEN, WORKS) != WORKS):
            return None
        return {"path": folder.path, "kind": folder.kind or "unknown", "problem": problem}

    return symptom


def _free(least: int, most: int) -> Symptom:
    @of_node
    def symptom(node: NodeReport, seen: Examination) -> Values | None:
        free = seen.folder.free_bytes
        if free is None or not least <= free < most:
            return None
        return {"path": seen.folder.path, "free": _size(free)}

    return symptom


no_space, little_space = _free(0, NO_SPACE), _free(NO_SPACE, LITTLE_SPACE)


@of_node
def few_free_files(node: NodeReport, seen: Examination) -> Values | None:
    files = seen.folder.free_files
    if files is None or not 0 < files < FEWEST_FREE_FILES:  # some file systems count none: 0
        return None
    return {"path": seen.folder.path, "files": files}


# --- what a node allows ------------------------------------------------------------------------


@of_node
def no_shared_memory(node: NodeReport, seen: Examination) -> Values | None:
    return {} if seen.shared_memory_bytes is None else None


def _little_shared_memory(who: str, *, many_devices: bool) -> Symptom:
    @of_node
    def symptom(node: NodeReport, seen: Examination) -> Values | None:
        size = seen.shared_memory_bytes
        if size is None or size > SMALL_SHARED_MEMORY or (len(node.facts.gpus) > 1) != many_devices:
            return None
        return {"size": _size(size), "who": who}

    return symptom


too_little_for_nccl = _little_shared_memory("NCCL and data-loader workers", many_devices=True)
too_little_for_loaders = _little_shared_memory("data-loader workers", many_devices=False)


def _few_open_files(*, can_be_raised: bool) -> Symptom:
    @of_node
    def symptom(node: NodeReport, seen: Examination) -> Values | None:
        hard = seen.open_files_hard
        if seen.open_files >= FEWEST_FILES or can_be_raised == (0 <= hard < FEWEST_FILES):
            return None
        return {"files": seen.open_files, "fewest": FEWEST_FILES, "hard": hard}

    return symptom


few_open_files = _few_open_files(can_be_raised=True)
few_open_files_at_most = _few_open_files(can_be_raised=False)


def _time_left(least: float, most: float) -> Symptom:
    def symptom(collected: Collected) -> Iterator[tuple[str, Values]]:
        left = collected.time_left_s
        if left is not None and least <= left < most:
            yield "", {"left": max(0.0, left)}

    return symptom


time_over = _time_left(-float("inf"), TIME_NEARLY_OVER_S)
time_short = _time_left(TIME_NEARLY_OVER_S, TIME_IS_SHORT_S)


def clock_off(collected: Collected) -> Iterator[tuple[str, Values]]:
    for node in collected.nodes:
        offset, error = node.clock_offset_s, node.clock_error_s or 0.0
        if offset is not None and abs(offset) - error > CLOCK_S:
            side = "ahead" if offset > 0 else "behind"
            yield node.name, {"off": abs(offset), "side": side, "error": error}


@of_node
def fewer_cores(node: NodeReport, seen: Examination) -> Values | None:
    if seen.cores is None or seen.cores_allowed >= seen.cores:
        return None
    return {"allowed": seen.cores_allowed, "cores": seen.cores}


@of_node
def cpu_quota(node: NodeReport, seen: Examination) -> Values | None:
    if seen.cpu_quota is None or seen.cpu_quota >= seen.cores_allowed:
        return None
    return {"quota": seen.cpu_quota, "allowed": seen.cores_allowed}


@of_node
def memory_limit(node: NodeReport, seen: Examination) -> Values | None:
    limit, memory = seen.memory_limit_bytes, node.facts.memory_bytes
    if limit is None or memory is None or limit >= memory:
        return None
    return {"limit": _size(limit), "memory": _size(memory)}


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)
