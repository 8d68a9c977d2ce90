"""What `allranks doctor` finds: nodes and links as plain data, and the rules that judge them. Pure.

`doctor` collects the data, `NODE_RULES` and `PLACE_RULES` judge it, the command line prints it.
Unknown is `None`. The rules are for a training: a command of `allranks run` may need less, a user's
script more.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf, nan
from types import SimpleNamespace
from typing import Any

from allranks.job.units import format_bytes
from allranks.launcher.nodes.facts import MUST_BE_EQUAL, NodeFacts, differences
from allranks.tools.doctor.examination import SEEN, SEEN_LOCK, WORKS, Examination, Folder
from allranks.tools.doctor.probes import Matrix

STOP, WARNING, NOTE = "stop", "warning", "note"
UNKNOWN = "unknown"
FEWEST_FILES = 1024
SMALL_SHARED_MEMORY = 64 << 20  # a container's default
LITTLE_SPACE, NO_SPACE = 1 << 30, 16 << 20
FEWEST_FREE_FILES = 1000
CLOCK_S = 1.0
TIME_NEARLY_OVER_S, TIME_IS_SHORT_S = 60.0, 600.0
MUCH_SLOWER = 0.5


@dataclass(frozen=True)
class Finding:
    """A finding: it would stop a run, may harm one, or is a note.

    `node` is the name of the node; "" is the whole place.
    """

    level: str
    subject: str
    node: str
    found: str
    do: str


@dataclass(frozen=True)
class NodeReport:
    """One node. `clock_offset_s` is its clock minus the clock of the command.

    The offset is known up to `clock_error_s`: half of the shortest round trip.
    """

    number: int
    name: str
    address: str | None
    interface: str | None
    interfaces: dict[str, str]
    facts: NodeFacts
    examination: Examination | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


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


@dataclass(frozen=True)
class Diagnosis:
    """The whole diagnosis. If not all `asked_nodes` joined, `nodes` is this machine only."""

    place: str
    ranks: int
    asked_nodes: int
    nodes: tuple[NodeReport, ...]
    matrix: Matrix | None
    findings: tuple[Finding, ...]

    @property
    def stops(self) -> bool:
        """Whether something would stop a run."""
        return any(finding.level == STOP for finding in self.findings)

    def to_data(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "ranks": self.ranks,
            "asked_nodes": self.asked_nodes,
            "nodes": [asdict(node) for node in self.nodes],
            "matrix": None if self.matrix is None else self.matrix.to_data(),
            "differences": {
                "must_be_equal": must_be_equal(self.nodes),
                "may_differ": may_differ(self.nodes),
            },
            "findings": [asdict(finding) for finding in self.findings],
            "would_stop_a_run": self.stops,
        }


# --- the rules ------------------------------------------------------------------------------------


def _never(node: SimpleNamespace) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    """A row of `NODE_RULES`: a finding on each node for which one of the conditions is true.

    The texts name values of the node in braces; `_judged_values` has them all. A number that is
    unknown is NaN, so that no comparison with it is true.
    """

    subject: str
    found: str
    do: str
    stop: Callable[[SimpleNamespace], object] = _never
    warn: Callable[[SimpleNamespace], object] = _never
    note: Callable[[SimpleNamespace], object] = _never

    def on(self, node: str, values: dict[str, Any]) -> Iterator[Finding]:
        for level, applies in ((STOP, self.stop), (WARNING, self.warn), (NOTE, self.note)):
            if applies(SimpleNamespace(**values)):
                found, do = self.found.format(**values), self.do.format(**values)
                yield Finding(level, self.subject, node, found, do)
                return


@dataclass(frozen=True)
class PlaceRule:
    """A row of `PLACE_RULES`: a finding on all nodes for each line of `found`."""

    level: str
    subject: str
    found: Callable[[Collected], Iterable[str]]
    do: str


def findings(collected: Collected) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    rows = [
        Finding(rule.level, rule.subject, "", line, rule.do)
        for rule in PLACE_RULES
        for line in rule.found(collected)
    ]
    for node in collected.nodes:
        values = _judged_values(node, collected)
        rows += [finding for rule in NODE_RULES for finding in rule.on(node.name, values)]
    return tuple(sorted(rows, key=lambda finding: (STOP, WARNING, NOTE).index(finding.level)))


def values_of(node: NodeReport) -> dict[str, Any]:
    """The facts of a node, its limits, its folder, and a text for each size, by name."""
    limits: dict[str, Any] = dict.fromkeys(f.name for f in (*fields(Examination), *fields(Folder)))
    if node.examination is not None:
        limits = {**vars(node.examination), **vars(node.examination.folder)}
    values = {**vars(node.facts), **limits, **vars(node)}
    sizes = {n.removesuffix("_bytes"): size_of(values[n]) for n in values if n.endswith("_bytes")}
    return {**values, **sizes}


def _judged_values(node: NodeReport, collected: Collected) -> dict[str, Any]:
    """What `NODE_RULES` knows of a node."""
    values, offset_s = values_of(node), node.clock_offset_s or 0.0
    tried = values["tried"] or {}
    failed = {name for name, outcome in tried.items() if outcome != WORKS}
    version = node.facts.packages.get("torch")
    return {
        **{name: nan if value is None else value for name, value in values.items()},
        "failed": failed & {SEEN} or failed,  # the faults of another folder do not matter
        "has_others": len(collected.nodes) > 1,
        "is_examined": node.examination is not None,
        "kind": values["kind"] or UNKNOWN,
        "lost": collected.lost.get(node.name),
        "needs_torch": collected.needs_torch or "torch",
        "off_s": abs(offset_s),
        "side": "ahead" if offset_s > 0 else "behind",
        "torch": f"version {version}" if version else "not installed",
        "torch_fits": version and is_within(version, collected.needs_torch or ""),
    }


def _trial(name: str, subject: str, do: str, level: str = "stop") -> Rule:
    """A rule on an operation that fails in the folder of runs."""
    text = f"{{path}} ({{kind}}): {{tried[{name}]}}"
    return Rule(subject, text, do, **{level: lambda node: name in node.failed})


ANOTHER_FOLDER = "name another folder: --run-dir"
NODE_RULES = (
    Rule(
        "a node did not answer",
        "{lost}",
        "see what the node itself says: its log, its console, the scheduler",
        stop=lambda node: node.lost,
    ),
    Rule(
        "torch",
        "{torch}, and this version of allranks is for {needs_torch}",
        "python -m pip install '{needs_torch}', in the environment that is used there",
        stop=lambda node: not node.torch_fits,
    ),
    Rule(
        "network interface",
        "none that is up and has an IPv4 address, but the loopback",
        "bring one up that joins the nodes, or ask the site for it",
        stop=lambda node: node.has_others and not node.interfaces,
    ),
    Rule(
        "clock",
        "its clock is {off_s:.1f} s {side} (to ±{clock_error_s:.3f} s)",
        "set it by NTP or chrony: times in logs and files mislead",
        warn=lambda node: node.off_s - node.clock_error_s > CLOCK_S,
    ),
    Rule(
        "little space",
        "{path} has {free} left",
        "make room, or name a folder with more: --run-dir",
        stop=lambda node: node.free_bytes < NO_SPACE,
        warn=lambda node: node.free_bytes < LITTLE_SPACE,
    ),
    Rule(
        "few files",
        "{path} has room for {free_files} more files",
        "make room, or name a folder with more: --run-dir",
        warn=lambda node: 0 < node.free_files < FEWEST_FREE_FILES,  # 0: they are not counted
    ),
    Rule(
        "shared memory",
        "there is no /dev/shm: processes that load data have no way to hand it over",
        "mount a tmpfs at /dev/shm",
        stop=lambda node: node.is_examined and node.shared_memory == UNKNOWN,
    ),
    Rule(
        "shared memory",
        "/dev/shm holds {shared_memory}: NCCL and data-loader workers end with a bus error when it "
        "is full",
        "give the container more: docker run --shm-size=8g or --ipc=host",
        stop=lambda node: node.shared_memory_bytes <= SMALL_SHARED_MEMORY and len(node.gpus) > 1,
        warn=lambda node: node.shared_memory_bytes <= SMALL_SHARED_MEMORY,
    ),
    Rule(
        "open files",
        f"at most {{open_files}} open files, and {FEWEST_FILES} are few for a rank",
        "ulimit -n 4096, before the start; or ask the site, if the hard limit of {open_files_hard} "
        "is less",
        stop=lambda node: node.open_files < FEWEST_FILES,
    ),
    Rule(
        "cores",
        "{cores_allowed} of {cores} cores are allowed",
        "ranks share those; ask the scheduler for more if it should be all",
        note=lambda node: node.cores_allowed < node.cores,
    ),
    Rule(
        "time of processors",
        "the control group gets the time of {cpu_quota:g} cores, of {cores_allowed} that are seen",
        "set --threads so that all ranks together have no more, or raise the quota",
        warn=lambda node: node.cpu_quota < node.cores_allowed,
    ),
    Rule(
        "memory",
        "the control group may use {memory_limit}, of {memory} that are seen",
        "ranks that use more are killed; ask for more memory if a run needs it",
        note=lambda node: node.memory_limit_bytes < node.memory_bytes,
    ),
    _trial(
        SEEN,
        "the folder of runs is not shared",
        "name a folder on storage that all nodes share: --run-dir",
    ),
    _trial("write", "the folder of runs cannot be written", ANOTHER_FOLDER),
    _trial("fsync", "nothing can be made durable in the folder of runs", ANOTHER_FOLDER),
    _trial("rename", "no file can be replaced in the folder of runs", ANOTHER_FOLDER),
    _trial(
        "lock",
        "files of the folder of runs cannot be locked",
        "mount it with locks (Lustre: -o flock), or name another folder: --run-dir",
    ),
    _trial(
        SEEN_LOCK,
        "locks of the folder of runs hold on one node only",
        "never start two jobs in one run folder; or mount it with locks that all nodes see",
        "warn",
    ),
)


def is_within(version: str, requirement: str) -> bool:
    """Whether a version meets a requirement like `torch>=2.11`; true for other texts."""
    least = re.search(r">=\s*([0-9][0-9.]*)", requirement)
    number = re.match(r"[0-9][0-9.]*", version)
    if least is None or number is None:
        return True
    wanted, has = (tuple(map(int, m.strip(".").split("."))) for m in (least[1], number[0]))
    return has >= wanted


# --- all nodes ------------------------------------------------------------------------------------


def must_be_equal(nodes: Sequence[NodeReport]) -> list[str]:
    """Differences between nodes that must be equal."""
    return differences({node.name: node.facts for node in nodes})


def may_differ(nodes: Sequence[NodeReport]) -> list[str]:
    """Differences between nodes that are allowed, but have effects."""
    return [line for name in MAY_DIFFER for line in _differing(name, nodes)]


def _differing(name: str, nodes: Sequence[NodeReport]) -> list[str]:
    """A line with the value on each node, if this fact of `MAY_DIFFER` differs."""
    values = {node.name: MAY_DIFFER[name][0](node.facts) for node in nodes}
    each = ", ".join(f"{node} has {value}" for node, value in values.items())
    return [f"{name}: {each}"] if len(set(values.values())) > 1 else []


def size_of(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def packages_of(facts: NodeFacts, without: Sequence[str]) -> str:
    named = sorted(facts.packages.items())
    return ", ".join(f"{name} {version}" for name, version in named if name not in without)


MAY_DIFFER: dict[str, tuple[Callable[[NodeFacts], str], str]] = {
    "processor": (
        lambda facts: facts.processor or UNKNOWN,
        "kernels choose their instructions by the processor: --bitwise may not hold",
    ),
    "cores": (
        lambda facts: str(facts.cores),
        "every step waits for the slowest rank: give the larger nodes more of them",
    ),
    "memory": (
        lambda facts: size_of(facts.memory_bytes),
        "what fits on one node may not fit on another",
    ),
    "devices": (
        lambda facts: ", ".join(facts.gpus) or "none",
        "every step waits for the slowest device, and its arithmetic may be another",
    ),
    "system": (lambda facts: facts.system, "nothing to do while all of them run"),
    "packages": (
        lambda facts: packages_of(facts, without=MUST_BE_EQUAL),
        "what a task computes with them may differ: install the same on all nodes",
    ),
}
"""Facts that may differ between nodes: the value on one node, and what to do."""


def _slow_link(collected: Collected) -> Iterator[str]:
    """The slowest link between nodes, if it is much slower than the median."""
    matrix = collected.matrix
    if matrix is None:
        return
    between = [
        (rate, f"{start.node} to {end.node}")
        for start, row in zip(matrix.ends, matrix.mb_per_s, strict=True)
        for end, rate in zip(matrix.ends, row, strict=True)
        if rate is not None and start.node != end.node
    ]
    if len(between) < 3:
        return
    usual, (slowest, link) = statistics.median(rate for rate, _ in between), min(between)
    if slowest < MUCH_SLOWER * usual:
        yield f"{link}: {slowest:.0f} MB/s, where {usual:.0f} are usual here"


def _time_left(least_s: float, below_s: float, left_s: float | None) -> list[str]:
    is_short = left_s is not None and least_s <= left_s < below_s
    return [f"the Slurm job ends in {max(0.0, left_s or 0.0):.0f} s"] if is_short else []


MORE_TIME = "submit it again with more time: allranks submit --time …"
PLACE_RULES = (
    PlaceRule(
        STOP,
        "the nodes are not alike",
        lambda collected: must_be_equal(collected.nodes),
        "install the same on every node, or share one environment",
    ),
    *(
        PlaceRule(
            NOTE,
            "the nodes differ",
            lambda collected, name=name: _differing(name, collected.nodes),  # type: ignore[misc]
            do,
        )
        for name, (_, do) in MAY_DIFFER.items()
    ),
    PlaceRule(
        STOP,
        "no way between ranks",
        lambda collected: collected.broken,
        "let the nodes reach each other at any TCP port (firewall), or name the network that joins "
        "them: --interface",
    ),
    PlaceRule(
        WARNING,
        "a slow way",
        _slow_link,
        "leave that node out, or look at its cable, its interface and its other users",
    ),
    PlaceRule(
        STOP,
        "time limit",
        lambda collected: _time_left(-inf, TIME_NEARLY_OVER_S, collected.time_left_s),
        MORE_TIME,
    ),
    PlaceRule(
        WARNING,
        "time limit",
        lambda collected: _time_left(TIME_NEARLY_OVER_S, TIME_IS_SHORT_S, collected.time_left_s),
        MORE_TIME,
    ),
)
