"""The rules of `allranks doctor`: what would stop a run, what may harm one, what differs. Pure.

`NODE_RULES` has a row for each problem of a single node; `place_findings` judges all nodes, their
links and their time. The rules are for a training: a command of `allranks run` may need less, a
user's script more.
"""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.job.units import format_bytes
from allranks.launcher.nodes.facts import MUST_BE_EQUAL, NodeFacts, differences
from allranks.tools.doctor.diagnosis import NOTE, STOP, WARNING, Finding, Matrix, NodeReport
from allranks.tools.doctor.examination import SEEN, SEEN_LOCK, WORKS, Examination

FEWEST_FILES = 1024
SMALL_SHARED_MEMORY = 64 << 20  # a container's default
LITTLE_SPACE, NO_SPACE = 1 << 30, 16 << 20
FEWEST_FREE_FILES = 1000
CLOCK_S = 1.0
TIME_NEARLY_OVER_S, TIME_IS_SHORT_S = 60.0, 600.0
MUCH_SLOWER = 0.5
LEADING_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")
CONDITION = re.compile(rf"(==|!=|>=|<=|>|<)\s*({LEADING_NUMBERS.pattern})")
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Collected:
    """The facts to judge. `needs_torch` is the range of torch that this version supports.

    `time_left_s` is the remaining time of the Slurm job. `lost` are nodes without an examination,
    and why; `broken` are links that could not be measured.
    """

    nodes: tuple[NodeReport, ...]
    needs_torch: str | None = None
    matrix: Matrix | None = None
    time_left_s: float | None = None
    lost: dict[str, str] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


def findings(collected: Collected) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    rows = list(place_findings(collected))
    for node in collected.nodes:
        if node.examination is not None:
            rows += node_findings(node, node.examination)
    return tuple(sorted(rows, key=lambda finding: (STOP, WARNING, NOTE).index(finding.level)))


# --- one node -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRule:
    """A finding on a node for which `applies`; the texts name its values in braces."""

    level: str
    subject: str
    text: str
    do: str
    applies: Callable[[NodeReport, Examination], bool]


def node_findings(node: NodeReport, limits: Examination) -> Iterator[Finding]:
    """What the examination of one node shows."""
    folder, facts = limits.folder, node.facts
    values = {
        **{**vars(limits), **vars(folder)},
        "fewest": FEWEST_FILES,
        "free": _size(folder.free_bytes),
        "limit": _size(limits.memory_limit_bytes),
        "memory": _size(facts.memory_bytes),
        "shared": _size(limits.shared_memory_bytes),
    }
    for rule in NODE_RULES:
        if rule.applies(node, limits):
            text, do = rule.text.format(**values), rule.do.format(**values)
            yield Finding(rule.level, rule.subject, node.name, text, do)
    if folder.tried.get(SEEN, WORKS) != WORKS:
        trials = [SEEN]  # the node sees another folder, so its other faults do not matter
    else:
        trials = [name for name in FAILED_TRIALS if folder.tried.get(name, WORKS) != WORKS]
    for name in trials:
        text = f"{folder.path} ({folder.kind or 'unknown'}): {folder.tried[name]}"
        level, subject, do = FAILED_TRIALS[name]
        yield Finding(level, subject, node.name, text, do)


def _has_little_shared_memory(limits: Examination) -> bool:
    size = limits.shared_memory_bytes
    return size is not None and size <= SMALL_SHARED_MEMORY


def _has_free(limits: Examination, least: int, most: int) -> bool:
    return limits.folder.free_bytes is not None and least <= limits.folder.free_bytes < most


FULL_SHARED_MEMORY = "/dev/shm holds {shared}: %s end with a bus error when it is full"
MORE_SHARED_MEMORY = "give the container more: docker run --shm-size=8g or --ipc=host"
FEW_FILES = "at most {open_files} open files, and {fewest} are few for a rank"
MORE_ROOM = "make room, or name a folder with more: --run-dir"
NODE_RULES = (
    NodeRule(
        *(STOP, "little space", "{path} has {free} left", MORE_ROOM),
        lambda node, limits: _has_free(limits, 0, NO_SPACE),
    ),
    NodeRule(
        *(WARNING, "little space", "{path} has {free} left", MORE_ROOM),
        lambda node, limits: _has_free(limits, NO_SPACE, LITTLE_SPACE),
    ),
    NodeRule(
        *(WARNING, "few files", "{path} has room for {free_files} more files", MORE_ROOM),
        lambda node, limits: 0 < (limits.folder.free_files or 0) < FEWEST_FREE_FILES,  # 0: unknown
    ),
    NodeRule(
        *(STOP, "shared memory"),
        "there is no /dev/shm: processes that load data have no way to hand it over",
        "mount a tmpfs at /dev/shm",
        lambda node, limits: limits.shared_memory_bytes is None,
    ),
    NodeRule(
        *(STOP, "shared memory", FULL_SHARED_MEMORY % "NCCL and data-loader workers"),
        MORE_SHARED_MEMORY,
        lambda node, limits: len(node.facts.gpus) > 1 and _has_little_shared_memory(limits),
    ),
    NodeRule(
        *(WARNING, "shared memory", FULL_SHARED_MEMORY % "data-loader workers"),
        MORE_SHARED_MEMORY,
        lambda node, limits: len(node.facts.gpus) <= 1 and _has_little_shared_memory(limits),
    ),
    NodeRule(
        *(STOP, "open files", FEW_FILES),
        "ulimit -n 4096, before the start",
        lambda node, limits: (
            limits.open_files < FEWEST_FILES and not 0 <= limits.open_files_hard < FEWEST_FILES
        ),
    ),
    NodeRule(
        *(STOP, "open files", FEW_FILES),
        "ask the site for more: the hard limit is {open_files_hard}",
        lambda node, limits: (
            limits.open_files < FEWEST_FILES and 0 <= limits.open_files_hard < FEWEST_FILES
        ),
    ),
    NodeRule(
        *(NOTE, "cores", "{cores_allowed} of {cores} cores are allowed"),
        "ranks share those; ask the scheduler for more if it should be all",
        lambda node, limits: limits.cores is not None and limits.cores_allowed < limits.cores,
    ),
    NodeRule(
        *(WARNING, "time of processors"),
        "the control group gets the time of {cpu_quota:g} cores, of {cores_allowed} that are seen",
        "set --threads so that all ranks together have no more, or raise the quota",
        lambda _, limits: limits.cpu_quota is not None and limits.cpu_quota < limits.cores_allowed,
    ),
    NodeRule(
        *(NOTE, "memory", "the control group may use {limit}, of {memory} that are seen"),
        "ranks that use more are killed; ask for more memory if a run needs it",
        lambda node, limits: (
            limits.memory_limit_bytes is not None
            and limits.memory_limit_bytes < (node.facts.memory_bytes or 0)
        ),
    ),
)
FAILED_TRIALS = {
    SEEN: (
        *(STOP, "the folder of runs is not shared"),
        "name a folder on storage that all nodes share: --run-dir",
    ),
    "write": (STOP, "the folder of runs cannot be written", "name another folder: --run-dir"),
    "fsync": (STOP, "nothing can be made durable in the folder of runs", "name another: --run-dir"),
    "rename": (STOP, "no file can be replaced in the folder of runs", "name another: --run-dir"),
    "lock": (
        *(STOP, "files of the folder of runs cannot be locked"),
        "mount it with locks (Lustre: -o flock), or name another folder: --run-dir",
    ),
    SEEN_LOCK: (
        *(WARNING, "locks of the folder of runs hold on one node only"),
        "never start two jobs in one run folder; or mount it with locks that all nodes see",
    ),
}
"""For each trial in the folder of runs that may fail: how bad it is, in words, and what to do."""


# --- all nodes ----------------------------------------------------------------------------------


def place_findings(collected: Collected) -> Iterator[Finding]:
    """Findings on all nodes together: their versions, their links and their time."""
    for name, why in collected.lost.items():
        do = "see what the node itself says: its log, its console, the scheduler"
        yield Finding(STOP, "a node did not answer", name, why, do)
    for line in must_be_equal(collected.nodes):
        do = "install the same on every node, or share one environment"
        yield Finding(STOP, "the nodes are not alike", "", line, do)
    for name, line in _differences(collected.nodes):
        yield Finding(NOTE, "the nodes differ", "", line, MAY_DIFFER[name][1])
    for node in collected.nodes:
        yield from _torch(node, collected.needs_torch)
        if len(collected.nodes) > 1 and not node.interfaces:
            text = "none that is up and has an IPv4 address, but the loopback"
            do = "bring one up that joins the nodes, or ask the site for it"
            yield Finding(STOP, "network interface", node.name, text, do)
        offset_s, error_s = node.clock_offset_s, node.clock_error_s or 0.0
        if offset_s is not None and abs(offset_s) - error_s > CLOCK_S:
            side = "ahead" if offset_s > 0 else "behind"
            text = f"its clock is {abs(offset_s):.1f} s {side} (to ±{error_s:.3f} s)"
            do = "set it by NTP or chrony: times in logs and files mislead"
            yield Finding(WARNING, "clock", node.name, text, do)
    for line in collected.broken:
        do = "let the nodes reach each other at any TCP port (firewall), or name the network that "
        yield Finding(STOP, "no way between ranks", "", line, f"{do}joins them: --interface")
    if collected.matrix is not None:
        yield from _slow_link(collected.matrix)
    left_s = collected.time_left_s
    if left_s is not None and left_s < TIME_IS_SHORT_S:
        level = STOP if left_s < TIME_NEARLY_OVER_S else WARNING
        text = f"the Slurm job ends in {max(0.0, left_s):.0f} s"
        do = "submit it again with more time: allranks submit --time …"
        yield Finding(level, "time limit", "", text, do)


def must_be_equal(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """Differences between nodes that must be equal."""
    return tuple(differences({node.name: node.facts for node in nodes}))


def may_differ(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """Differences between nodes that are allowed, but have effects."""
    return tuple(line for _, line in _differences(nodes))


def _differences(nodes: Sequence[NodeReport]) -> Iterator[tuple[str, str]]:
    """Each fact of `MAY_DIFFER` that differs, with the value on each node."""
    for name, (value_of, _) in MAY_DIFFER.items():
        values = {node.name: value_of(node.facts) for node in nodes}
        if len(set(values.values())) > 1:
            each = ", ".join(f"{node} has {value}" for node, value in values.items())
            yield name, f"{name}: {each}"


def _packages(facts: NodeFacts) -> str:
    packages = sorted(facts.packages.items())
    return ", ".join(f"{name} {version}" for name, version in packages if name not in MUST_BE_EQUAL)


MAY_DIFFER: dict[str, tuple[Callable[[NodeFacts], str], str]] = {
    "processor": (
        lambda facts: facts.processor or "unknown",
        "kernels choose their instructions by the processor: --bitwise may not hold",
    ),
    "cores": (
        lambda facts: str(facts.cores),
        "every step waits for the slowest rank: give the larger nodes more of them",
    ),
    "memory": (
        lambda facts: _size(facts.memory_bytes),
        "what fits on one node may not fit on another",
    ),
    "devices": (
        lambda facts: ", ".join(facts.gpus) or "none",
        "every step waits for the slowest device, and its arithmetic may be another",
    ),
    "system": (lambda facts: facts.system, "nothing to do while all of them run"),
    "packages": (
        _packages,
        "what a task computes with them may differ: install the same on all nodes",
    ),
}
"""Facts that may differ between nodes: the value on one node, and what to do."""


def _torch(node: NodeReport, wanted: str | None) -> Iterator[Finding]:
    """A node without torch, or with a version that this allranks does not support."""
    version = node.facts.packages.get("torch")
    do = f"python -m pip install '{wanted or 'torch'}', in the environment that is used there"
    if version is None:
        yield Finding(STOP, "torch", node.name, "not installed", do)
    elif wanted is not None and not is_within(version, wanted):
        text = f"version {version}, and this version of allranks is for {wanted}"
        yield Finding(STOP, "torch", node.name, text, do)


def is_within(version: str, requirement: str) -> bool:
    """Whether a version meets a requirement like `torch>=2.13,<2.14`; true for other texts."""
    numbers = LEADING_NUMBERS.match(version)
    conditions = CONDITION.findall(requirement.partition(";")[0])
    return numbers is None or all(
        COMPARISONS[sign](*_padded(numbers[0], bound)) for sign, bound in conditions
    )


def _padded(*versions: str) -> list[list[int]]:
    """Versions as numbers, all as long as the longest: 2.13 is 2.13.0."""
    parts = [[int(part) for part in version.split(".")] for version in versions]
    longest = max(map(len, parts))
    return [numbers + [0] * (longest - len(numbers)) for numbers in parts]


def _slow_link(matrix: Matrix) -> Iterator[Finding]:
    """The slowest link between nodes, if it is much slower than the median."""
    ends = matrix.ends
    between = [
        (rate, f"{ends[i].node} to {ends[j].node}")
        for i, row in enumerate(matrix.mb_per_s)
        for j, rate in enumerate(row)
        if rate is not None and ends[i].node != ends[j].node
    ]
    if len(between) < 3:
        return
    usual, (slowest, way) = statistics.median(rate for rate, _ in between), min(between)
    if slowest < MUCH_SLOWER * usual:
        text = f"{way}: {slowest:.0f} MB/s, where {usual:.0f} are usual here"
        do = "leave that node out, or look at its cable, its interface and its other users"
        yield Finding(WARNING, "a slow way", "", text, do)


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)
