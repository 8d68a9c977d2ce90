"""The rules of `allranks doctor`: what would stop a run, what may spoil one, what differs. Pure.

A rule is a row: how bad it is, what is said, what to do about it, and the symptom that it follows
from. What a training needs is judged: a command of `allranks run` may need less, a script of a user
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allranks.tools.doctor import symptoms
from allranks.tools.doctor.diagnosis import NOTE, STOP, WARNING, Finding
from allranks.tools.doctor.examination import SEEN, SEEN_LOCK
from allranks.tools.doctor.symptoms import Collected, Symptom


@dataclass(frozen=True)
class Rule:
    """A finding for each place that has the `symptom`; its values are in braces in the texts."""

    level: str
    subject: str
    found: str
    do: str
    symptom: Symptom

    def findings(self, collected: Collected) -> Iterator[Finding]:
        """One for each node, link or difference that has the symptom."""
        for node, values in self.symptom(collected):
            found, do = self.found.format(**values), self.do.format(**values)
            yield Finding(self.level, self.subject, node, found, do)


def findings(collected: Collected) -> tuple[Finding, ...]:
    """All that is to be said, the worst first."""
    found = [finding for rule in RULES for finding in rule.findings(collected)]
    order = (STOP, WARNING, NOTE)
    return tuple(sorted(found, key=lambda finding: order.index(finding.level)))


INSTALL = "python -m pip install '{wanted}', in the environment that is used there"
BUS_ERROR = "/dev/shm holds {size}: {who} end with a bus error when it is full"
MORE_SHARED_MEMORY = "give the container more: docker run --shm-size=8g or --ipc=host"
FEW_FILES = "at most {files} open files, and {fewest} are few for a rank"
TRIED = "{path} ({kind}): {problem}"
MORE_ROOM = "make room, or name a folder with more: --run-dir"
SUBMIT_AGAIN = "submit it again with more time: allranks submit --time …"

RULES = (
    Rule(
        *(STOP, "a node did not answer", "{why}"),
        "see what the node itself says: its log, its console, the scheduler",
        symptoms.lost_node,
    ),
    Rule(
        *(STOP, "the nodes are not alike", "{line}"),
        "install the same on every node, or share one environment",
        symptoms.unequal,
    ),
    Rule(
        *(NOTE, "the nodes differ", "{line}"),
        "kernels choose their instructions by the processor: --bitwise may not hold",
        symptoms.differs("processor"),
    ),
    Rule(
        *(NOTE, "the nodes differ", "{line}"),
        "every step waits for the slowest rank: give the larger nodes more of them",
        symptoms.differs("cores"),
    ),
    Rule(
        *(NOTE, "the nodes differ", "{line}"),
        "what fits on one node may not fit on another",
        symptoms.differs("memory"),
    ),
    Rule(
        *(NOTE, "the nodes differ", "{line}"),
        "every step waits for the slowest device, and its arithmetic may be another",
        symptoms.differs("devices"),
    ),
    Rule(
        *(NOTE, "the nodes differ", "{line}"),
        "nothing to do while all of them run",
        symptoms.differs("system"),
    ),
    Rule(
        *(NOTE, "the nodes differ", "{line}"),
        "what a task computes with them may differ: install the same on all nodes",
        symptoms.differs("packages"),
    ),
    Rule(STOP, "torch", "not installed", INSTALL, symptoms.no_torch),
    Rule(
        *(STOP, "torch", "version {version}, and this version of allranks is for {wanted}"),
        INSTALL,
        symptoms.torch_out_of_range,
    ),
    Rule(
        *(STOP, "network interface", "none that is up and has an IPv4 address, but the loopback"),
        "bring one up that joins the nodes, or ask the site for it",
        symptoms.no_interface,
    ),
    Rule(
        *(STOP, "no way between ranks", "{line}"),
        "let the nodes reach each other at any TCP port (firewall), or name the network that joins "
        "them: --interface",
        symptoms.broken_link,
    ),
    Rule(
        *(WARNING, "a slow way", "{way}: {slowest:.0f} MB/s, where {usual:.0f} are usual here"),
        "leave that node out, or look at its cable, its interface and who else uses it",
        symptoms.slow_link,
    ),
    Rule(
        *(STOP, "the folder of runs is not shared", TRIED),
        "name a folder on storage that all nodes share: --run-dir",
        symptoms.fails(SEEN),
    ),
    Rule(
        *(STOP, "the folder of runs cannot be written", TRIED),
        "name another folder: --run-dir",
        symptoms.fails("write"),
    ),
    Rule(
        *(STOP, "nothing can be made durable in the folder of runs", TRIED),
        "name another: --run-dir",
        symptoms.fails("fsync"),
    ),
    Rule(
        *(STOP, "no file can be replaced in the folder of runs", TRIED),
        "name another: --run-dir",
        symptoms.fails("rename"),
    ),
    Rule(
        *(STOP, "files of the folder of runs cannot be locked", TRIED),
        "mount it with locks (Lustre: -o flock), or name another folder: --run-dir",
        symptoms.fails("lock"),
    ),
    Rule(
        *(WARNING, "locks of the folder of runs hold on one node only", TRIED),
        "never start two jobs in one run folder; or mount it with locks that all nodes see",
        symptoms.fails(SEEN_LOCK),
    ),
    Rule(STOP, "little space", "{path} has {free} left", MORE_ROOM, symptoms.no_space),
    Rule(WARNING, "little space", "{path} has {free} left", MORE_ROOM, symptoms.little_space),
    Rule(
        *(WARNING, "few files", "{path} has room for {files} more files"),
        MORE_ROOM,
        symptoms.few_free_files,
    ),
    Rule(
        *(STOP, "shared memory"),
        "there is no /dev/shm: processes that load data have no way to hand it over",
        "mount a tmpfs at /dev/shm",
        symptoms.no_shared_memory,
    ),
    Rule(STOP, "shared memory", BUS_ERROR, MORE_SHARED_MEMORY, symptoms.too_little_for_nccl),
    Rule(WARNING, "shared memory", BUS_ERROR, MORE_SHARED_MEMORY, symptoms.too_little_for_loaders),
    Rule(
        *(STOP, "open files", FEW_FILES),
        "ulimit -n 4096, before the start",
        symptoms.few_open_files,
    ),
    Rule(
        *(STOP, "open files", FEW_FILES),
        "ask the site for more: the hard limit is {hard}",
        symptoms.few_open_files_at_most,
    ),
    Rule(
        *(STOP, "time limit", "the Slurm job ends in {left:.0f} s"),
        SUBMIT_AGAIN,
        symptoms.time_over,
    ),
    Rule(
        *(WARNING, "time limit", "the Slurm job ends in {left:.0f} s"),
        SUBMIT_AGAIN,
        symptoms.time_short,
    ),
    Rule(
        *(WARNING, "clock", "its clock is {off:.1f} s {side} (to ±{error:.3f} s)"),
        "set it by NTP or chrony: times in logs and files mislead",
        symptoms.clock_off,
    ),
    Rule(
        *(NOTE, "cores", "{allowed} of {cores} cores are allowed"),
        "ranks share those; ask the scheduler for more if it should be all",
        symptoms.fewer_cores,
    ),
    Rule(
        *(WARNING, "time of processors"),
        "the control group gets the time of {quota:g} cores, of {allowed} that are seen",
        "set --threads so that all ranks together have no more, or raise the quota",
        symptoms.cpu_quota,
    ),
    Rule(
        *(NOTE, "memory", "the control group may use {limit}, of {memory} that are seen"),
        "ranks that use more are killed; ask for more memory if a run needs it",
        symptoms.memory_limit,
    ),
)
