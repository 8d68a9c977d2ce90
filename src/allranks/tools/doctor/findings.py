"""The rules of `allranks doctor`: what would stop a run, what may spoil one, what differs. Pure.

Each rule looks at what was collected and yields findings, each with what to do about it. What a
training needs is judged: a command of `allranks run` may need less, a script of a user more.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from allranks.job.units import format_bytes
from allranks.launcher.nodes.facts import MUST_BE_EQUAL, Facts, differences
from allranks.tools.doctor.diagnosis import NOTE, STOP, WARNING, Finding, Matrix, NodeReport
from allranks.tools.doctor.examination import SEEN, SEEN_LOCK, WORKS

FEWEST_FILES = 1024
SMALL_SHARED_MEMORY = 64 << 20  # what a container gets if nobody asks for more
LITTLE_SPACE, NO_SPACE = 1 << 30, 16 << 20
FEWEST_FREE_FILES = 1000
CLOCK_S = 1.0
TIME_NEARLY_OVER_S, TIME_IS_SHORT_S = 60.0, 600.0
MUCH_SLOWER = 0.5
CONDITION = re.compile(r"(==|!=|>=|<=|>|<)\s*([0-9]+(?:\.[0-9]+)*)")
LEADING_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")


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


def findings(collected: Collected) -> tuple[Finding, ...]:
    """All that is to be said, the worst first."""
    found = [finding for rule in RULES for finding in rule(collected)]
    order = (STOP, WARNING, NOTE)
    return tuple(sorted(found, key=lambda finding: order.index(finding.level)))


def must_be_equal(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """What is not the same on all nodes, and has to be."""
    return tuple(differences({node.name: node.facts for node in nodes}))


def may_differ(nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """What is not the same on all nodes and need not be, but makes itself felt."""
    lines = []
    for name, value_of in _WORTH_KNOWING.items():
        values = {node.name: value_of(node.facts) for node in nodes}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{node} has {value}" for node, value in values.items())
            lines.append(f"{name}: {told}")
    return tuple(lines)


_BITWISE = "processor"
_WORTH_KNOWING: dict[str, Callable[[Facts], str]] = {
    _BITWISE: lambda facts: facts.processor or "unknown",
    "cores": lambda facts: str(facts.cores),
    "memory": lambda facts: _size(facts.memory_bytes),
    "devices": lambda facts: ", ".join(facts.gpus) or "none",
    "system": lambda facts: facts.system,
    "packages": lambda facts: ", ".join(
        f"{name} {version}"
        for name, version in sorted(facts.packages.items())
        if name not in MUST_BE_EQUAL
    ),
}
_WHY = {
    _BITWISE: "kernels choose their instructions by the processor: --bitwise may not hold",
    "cores": "every step waits for the slowest rank: give the larger nodes more of them",
    "memory": "what fits on one node may not fit on another",
    "devices": "every step waits for the slowest device, and its arithmetic may be another",
    "system": "nothing to do while all of them run",
    "packages": "what a task computes with them may differ: install the same on all nodes",
}


def _unlike(collected: Collected) -> Iterator[Finding]:
    for line in must_be_equal(collected.nodes):
        do = "install the same on every node, or share one environment"
        yield Finding(STOP, "the nodes are not alike", "", line, do)
    for line in may_differ(collected.nodes):
        name = line.partition(":")[0]
        yield Finding(NOTE, "the nodes differ", "", line, _WHY[name])


def _lost(collected: Collected) -> Iterator[Finding]:
    for node, why in collected.lost.items():
        do = "see what the node itself says: its log, its console, the scheduler"
        yield Finding(STOP, "a node did not answer", node, why, do)


def _torch(collected: Collected) -> Iterator[Finding]:
    wanted = collected.needs_torch
    install = f"python -m pip install '{wanted or 'torch'}', in the environment that is used there"
    for node in collected.nodes:
        version = node.facts.packages.get("torch")
        if version is None:
            yield Finding(STOP, "torch", node.name, "not installed", install)
        elif wanted is not None and not is_within(version, wanted):
            found = f"version {version}, and this version of allranks is for {wanted}"
            yield Finding(STOP, "torch", node.name, found, install)


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


def _interfaces(collected: Collected) -> Iterator[Finding]:
    for node in collected.nodes:
        if len(collected.nodes) > 1 and not node.interfaces:
            found = "none that is up and has an IPv4 address, but the loopback"
            do = "bring one up that joins the nodes, or ask the site for it"
            yield Finding(STOP, "network interface", node.name, found, do)


def _shared_memory(collected: Collected) -> Iterator[Finding]:
    do = "give the container more: docker run --shm-size=8g or --ipc=host"
    for node in collected.nodes:
        if node.examination is None:
            continue
        size = node.examination.shared_memory_bytes
        if size is None:
            found = "there is no /dev/shm: processes that load data have no way to hand it over"
            yield Finding(STOP, "shared memory", node.name, found, "mount a tmpfs at /dev/shm")
        elif size <= SMALL_SHARED_MEMORY:
            many = len(node.facts.gpus) > 1
            who = "NCCL and data-loader workers" if many else "data-loader workers"
            found = f"/dev/shm holds {_size(size)}: {who} end with a bus error when it is full"
            level = STOP if many else WARNING
            yield Finding(level, "shared memory", node.name, found, do)


def _open_files(collected: Collected) -> Iterator[Finding]:
    for node in collected.nodes:
        if node.examination is not None and node.examination.open_files < FEWEST_FILES:
            files, hard = node.examination.open_files, node.examination.open_files_hard
            found = f"at most {files} open files, and {FEWEST_FILES} are few for a rank"
            do = "ulimit -n 4096, before the start"
            if 0 <= hard < FEWEST_FILES:
                do = f"ask the site for more: the hard limit is {hard}"
            yield Finding(STOP, "open files", node.name, found, do)


def _folder(collected: Collected) -> Iterator[Finding]:
    for node in collected.nodes:
        if node.examination is None:
            continue
        folder = node.examination.folder
        for name, (level, subject, do) in _TRIALS.items():
            problem = folder.tried.get(name, WORKS)
            if problem != WORKS:
                found = f"{folder.path} ({folder.kind or 'unknown'}): {problem}"
                yield Finding(level, subject, node.name, found, do)
                if name == SEEN:
                    break  # it is another folder, or none
        yield from _space(node)


_SHARE = "name a folder on storage that all nodes share: --run-dir"
_TRIALS = {
    SEEN: (STOP, "the folder of runs is not shared", _SHARE),
    "write": (STOP, "the folder of runs cannot be written", "name another folder: --run-dir"),
    "fsync": (STOP, "nothing can be made durable in the folder of runs", "name another: --run-dir"),
    "rename": (STOP, "no file can be replaced in the folder of runs", "name another: --run-dir"),
    "lock": (
        STOP,
        "files of the folder of runs cannot be locked",
        "mount it with locks (Lustre: -o flock), or name another folder: --run-dir",
    ),
    SEEN_LOCK: (
        WARNING,
        "locks of the folder of runs hold on one node only",
        "never start two jobs in one run folder; or mount it with locks that all nodes see",
    ),
}


def _space(node: NodeReport) -> Iterator[Finding]:
    assert node.examination is not None
    folder = node.examination.folder
    free, files = folder.free_bytes, folder.free_files
    do = "make room, or name a folder with more: --run-dir"
    if free is not None and free < LITTLE_SPACE:
        level = STOP if free < NO_SPACE else WARNING
        found = f"{folder.path} has {_size(free)} left"
        yield Finding(level, "little space", node.name, found, do)
    if files is not None and 0 < files < FEWEST_FREE_FILES:  # some kinds count none: 0
        found = f"{folder.path} has room for {files} more files"
        yield Finding(WARNING, "few files", node.name, found, do)


def _cores_and_memory(collected: Collected) -> Iterator[Finding]:
    for node in collected.nodes:
        seen = node.examination
        if seen is None:
            continue
        if seen.cores is not None and seen.cores_allowed < seen.cores:
            found = f"{seen.cores_allowed} of {seen.cores} cores are allowed"
            do = "ranks share those; ask the scheduler for more if it should be all"
            yield Finding(NOTE, "cores", node.name, found, do)
        if seen.cpu_quota is not None and seen.cpu_quota < seen.cores_allowed:
            found = f"the control group gets the time of {seen.cpu_quota:g} cores, of "
            found += f"{seen.cores_allowed} that are seen"
            do = "set --threads so that all ranks together have no more, or raise the quota"
            yield Finding(WARNING, "time of processors", node.name, found, do)
        limit, memory = seen.memory_limit_bytes, node.facts.memory_bytes
        if limit is not None and memory is not None and limit < memory:
            found = f"the control group may use {_size(limit)}, of {_size(memory)} that are seen"
            do = "ranks that use more are killed; ask for more memory if a run needs it"
            yield Finding(NOTE, "memory", node.name, found, do)


def _clocks(collected: Collected) -> Iterator[Finding]:
    for node in collected.nodes:
        offset, error = node.clock_offset_s, node.clock_error_s or 0.0
        if offset is not None and abs(offset) - error > CLOCK_S:
            side = "ahead" if offset > 0 else "behind"
            found = f"its clock is {abs(offset):.1f} s {side} (to ±{error:.3f} s)"
            do = "set it by NTP or chrony: times in logs and files mislead"
            yield Finding(WARNING, "clock", node.name, found, do)


def _time_limit(collected: Collected) -> Iterator[Finding]:
    left = collected.time_left_s
    if left is not None and left < TIME_IS_SHORT_S:
        level = STOP if left < TIME_NEARLY_OVER_S else WARNING
        found = f"the Slurm job ends in {max(0.0, left):.0f} s"
        do = "submit it again with more time: allranks submit --time …"
        yield Finding(level, "time limit", "", found, do)


def _links(collected: Collected) -> Iterator[Finding]:
    for line in collected.broken:
        do = "let the nodes reach each other at any TCP port (firewall), or name the network "
        yield Finding(STOP, "no way between ranks", "", line, f"{do}that joins them: --interface")
    yield from _slow_link(collected)


def _slow_link(collected: Collected) -> Iterator[Finding]:
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
        found = f"{way}: {slowest:.0f} MB/s, where {usual:.0f} are usual here"
        do = "leave that node out, or look at its cable, its interface and who else uses it"
        yield Finding(WARNING, "a slow way", "", found, do)


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


RULES: tuple[Callable[[Collected], Iterator[Finding]], ...] = (
    _lost,
    _unlike,
    _torch,
    _interfaces,
    _links,
    _folder,
    _shared_memory,
    _open_files,
    _time_limit,
    _clocks,
    _cores_and_memory,
)
