"""What `allranks doctor` finds: nodes and links as plain data, and the rules that judge them. Pure.

Unknown is `None`. The rules are for a training: a command of `allranks run` may need less, a user's
script more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

from allranks.job.units import format_bytes
from allranks.launcher.nodes.facts import MUST_BE_EQUAL, NodeFacts, differences
from allranks.tools.doctor.folder import LOCK, SEEN, WORKS, WRITE, Folder
from allranks.tools.doctor.probes import Matrix

STOP, WARNING, NOTE = "stop", "warning", "note"
UNKNOWN = "unknown"
FEWEST_FILES = 1024
SMALL_SHARED_MEMORY = 64 << 20  # a container's default
LITTLE_SPACE, NO_SPACE = 1 << 30, 16 << 20


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
    """One node. `folder` is the folder of runs as it sees it; `lost` says why that is unknown."""

    number: int
    name: str
    address: str | None
    interface: str | None
    interfaces: dict[str, str]
    facts: NodeFacts
    folder: Folder | None = None
    lost: str = ""

    def failed(self, trial: str) -> bool:
        """Whether a test of the folder failed. The faults of another folder do not matter."""
        tried = {} if self.folder is None else self.folder.tried
        is_another = tried.get(SEEN, WORKS) != WORKS
        return tried.get(trial, WORKS) != WORKS and (trial == SEEN or not is_another)

    def values(self) -> dict[str, Any]:
        """Texts about this node by name, for the rules and for people."""
        facts, folder = self.facts, self.folder or Folder("", None, None, {})
        packages = [f"{name} {v}" for name, v in facts.packages.items() if name != "torch"]
        known = {**vars(facts), **vars(folder), **vars(self)}
        return {
            **{name: UNKNOWN if value is None else value for name, value in known.items()},
            "devices": ", ".join(facts.gpus) or "no GPU",
            "free": size_of(folder.free_bytes),
            "interfaces": ", ".join(map(" ".join, self.interfaces.items())) or "none",
            "memory": size_of(facts.memory_bytes),
            "packages": ", ".join(packages) or "none",
            "program": facts.program or "none named",
            "shared_memory": size_of(facts.shared_memory_bytes),
            "torch": facts.packages.get("torch", "none"),
        }


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
            **asdict(self),
            "matrix": None if self.matrix is None else self.matrix.to_data(),
            "differences": {
                "must_be_equal": must_be_equal(self.nodes),
                "may_differ": [line for line, _ in may_differ(self.nodes)],
            },
            "would_stop_a_run": self.stops,
        }


# --- one node -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A row of `RULES`: a finding on each node for which `when` is true.

    The `text` names some of `NodeReport.values` in braces.
    """

    level: str
    subject: str
    when: Callable[[NodeReport], object]
    text: str
    do: str


def _has_free(node: NodeReport, least: int, below: int) -> bool:
    free = None if node.folder is None else node.folder.free_bytes
    return free is not None and least <= free < below


def _has_small_shared_memory(node: NodeReport) -> bool:
    size = node.facts.shared_memory_bytes
    return size is not None and size <= SMALL_SHARED_MEMORY


@cache
def oldest_torch() -> str:
    """The oldest torch that the installed allranks supports; "" if unknown."""
    with suppress(metadata.PackageNotFoundError):
        for need in metadata.requires("allranks") or []:
            if match := re.match(r"torch>=([\d.]+)", need):
                return match[1]
    return ""


def _is_older(version: str | None, least: str) -> bool:
    numbers = [list(map(int, re.findall(r"\d+", text)[:2])) for text in (version or "", least)]
    return all(numbers) and numbers[0] < numbers[1]


FULL_SHARED_MEMORY = "/dev/shm has {shared_memory}: %s end with a bus error when it is full"
MORE_SHARED_MEMORY = "give the container more: docker run --shm-size=8g or --ipc=host"
MORE_ROOM = "make room, or name a folder with more: --run-dir"
RULES = (
    Rule(
        STOP,
        "a node did not answer",
        lambda node: node.lost,
        "{lost}",
        "see what the node itself says: its log, its console, the scheduler",
    ),
    Rule(
        STOP,
        "torch",
        lambda node: "torch" not in node.facts.packages,
        "not installed",
        "python -m pip install torch, in the environment that is used there",
    ),
    Rule(
        STOP,
        "torch",
        lambda node: _is_older(node.facts.packages.get("torch"), oldest_torch()),
        f"version {{torch}}, and this version of allranks needs {oldest_torch()}",
        f"python -m pip install 'torch>={oldest_torch()}', in the environment that is used there",
    ),
    Rule(
        STOP,
        "shared memory",
        lambda node: node.facts.shared_memory_bytes is None,
        "there is no /dev/shm: processes that load data have no way to hand it over",
        "mount a tmpfs at /dev/shm",
    ),
    Rule(
        STOP,
        "shared memory",
        lambda node: _has_small_shared_memory(node) and len(node.facts.gpus) > 1,
        FULL_SHARED_MEMORY % "NCCL and data-loader workers",
        MORE_SHARED_MEMORY,
    ),
    Rule(
        WARNING,
        "shared memory",
        lambda node: _has_small_shared_memory(node) and len(node.facts.gpus) <= 1,
        FULL_SHARED_MEMORY % "data-loader workers",
        MORE_SHARED_MEMORY,
    ),
    Rule(
        STOP,
        "open files",
        lambda node: node.facts.open_files < FEWEST_FILES,
        f"at most {{open_files}} open files, and {FEWEST_FILES} are few for a rank",
        "ulimit -n 4096, before the start; or ask the site for a higher hard limit",
    ),
    Rule(
        STOP,
        "little space",
        lambda node: _has_free(node, 0, NO_SPACE),
        "{path} has {free} left",
        MORE_ROOM,
    ),
    Rule(
        WARNING,
        "little space",
        lambda node: _has_free(node, NO_SPACE, LITTLE_SPACE),
        "{path} has {free} left",
        MORE_ROOM,
    ),
    Rule(
        STOP,
        "the folder of runs is not shared",
        lambda node: node.failed(SEEN),
        "{path} ({kind}): {tried[seen]}",
        "name a folder on storage that all nodes share: --run-dir",
    ),
    Rule(
        STOP,
        "the folder of runs cannot be written",
        lambda node: node.failed(WRITE),
        "{path} ({kind}): {tried[write]}",
        "name another folder: --run-dir",
    ),
    Rule(
        STOP,
        "files of the folder of runs cannot be locked",
        lambda node: node.failed(LOCK),
        "{path} ({kind}): {tried[lock]}",
        "mount it with locks (Lustre: -o flock), or name another folder: --run-dir",
    ),
)


# --- all nodes ------------------------------------------------------------------------------------


def findings(nodes: Sequence[NodeReport], broken: Sequence[str] = ()) -> tuple[Finding, ...]:
    """All findings on nodes and on the links that are `broken`, the worst first."""
    alike = "install the same on every node, or share one environment"
    open_ports = (
        "let the nodes reach each other at any TCP port (firewall), or name the network that joins "
        "them: --interface"
    )
    rows = [
        *(Finding(STOP, "the nodes are not alike", "", n, alike) for n in must_be_equal(nodes)),
        *(Finding(NOTE, "the nodes differ", "", line, do) for line, do in may_differ(nodes)),
        *(Finding(STOP, "no way between ranks", "", line, open_ports) for line in broken),
        *(
            Finding(rule.level, rule.subject, n.name, rule.text.format(**n.values()), rule.do)
            for n in nodes
            for rule in RULES
            if rule.when(n)
        ),
    ]
    return tuple(sorted(rows, key=lambda finding: (STOP, WARNING, NOTE).index(finding.level)))


def must_be_equal(nodes: Sequence[NodeReport]) -> list[str]:
    """Differences between nodes that must be equal."""
    return differences({node.name: node.facts for node in nodes})


def may_differ(nodes: Sequence[NodeReport]) -> list[tuple[str, str]]:
    """Differences between nodes that are allowed, but have effects; and what to do."""
    lines = []
    for name, (value_of, do) in MAY_DIFFER.items():
        values = {node.name: value_of(node.facts) for node in nodes}
        if len(set(values.values())) > 1:
            each = ", ".join(f"{node} has {value}" for node, value in values.items())
            lines.append((f"{name}: {each}", do))
    return lines


def size_of(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _packages(facts: NodeFacts) -> str:
    packages = sorted(facts.packages.items())
    return ", ".join(f"{name} {version}" for name, version in packages if name not in MUST_BE_EQUAL)


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
        _packages,
        "what a task computes with them may differ: install the same on all nodes",
    ),
}
"""Facts that may differ between nodes: the value on one node, and what to do."""
