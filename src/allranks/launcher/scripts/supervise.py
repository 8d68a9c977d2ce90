"""The supervisor of scripts: starts, watches and stops processes that do not use allranks.

Scripts have no heartbeat: signals to the job are forwarded unchanged, and scripts get time to
leave; output is their sign of life. The first failure stops all. Parameter servers do not decide
the end of a job: it is done when the ranks that they serve are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from allranks.launcher.processes.process import Exit, Process, Processes
from allranks.launcher.supervisor import (
    EVIDENCE_S,
    NEVER,
    SUSPENDED_S,
    Signals,
    Watch,
)

LINGER_S = 2.0
STACKS_S = 3.0
LOOK_EVERY_S = 0.5


class ForwardedSignals(Signals):
    """Signals to the job that are forwarded to its scripts, each once.

    SIGUSR1 and SIGUSR2 are messages, and end no script. A second SIGINT kills all.
    """

    STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StopPolicy:
    """When scripts are stopped: the ranks that decide, and how long each wait lasts.

    The job is done when all ranks of `deciding` have ended well; those of `leaving` then have
    `grace_s` to end by themselves. `stop_at` is on the monotonic clock; `silence_s` 0 waits for
    ever. After a fault the supervisor waits `evidence_s` before it stops the others; after the
    exit of a victim (`is_victim(rank)`) it waits longer, until the cause can have ended too.
    """

    deciding: frozenset[int]
    leaving: frozenset[int]
    grace_s: float
    stop_at: float = NEVER
    silence_s: float = 0.0
    evidence_s: float = EVIDENCE_S
    is_victim: Callable[[int], bool] = lambda rank: False


@dataclass(frozen=True)
class ScriptsEnded:
    """How the scripts ended. `stopped` are the ranks that the supervisor ended.

    `reason` says why the job was asked to stop ("SIGTERM", "time limit"; "" if it was not),
    `passed_on` which signals were forwarded, `silent` whether all had stopped printing.
    """

    exits: dict[int, Exit]
    stopped: frozenset[int]
    reason: str
    passed_on: frozenset[int]
    silent: bool
    done: bool


def supervise_script(
    server: Processes,
    processes: list[Process],
    policy: StopPolicy,
    forwarded: ForwardedSignals,
    on_tick: Callable[[], None],
) -> ScriptsEnded:
    """Run all `processes` to their end. None is left when this returns or raises."""
    watch = _ScriptWatch(server, policy, [process.log for process in processes])
    watch.run(processes, on_tick, forwarded)
    return ScriptsEnded(
        watch.exits,
        watch.stopped,
        watch.reason,
        frozenset(watch.passed_on),
        watch.silent,
        watch.done,
    )


class _ScriptWatch(Watch):
    def __init__(self, server: Processes, policy: StopPolicy, logs: list[Path]) -> None:
        super().__init__(server, policy.stop_at)
        self.policy = policy
        self.passed_on: set[int] = set()
        self.silent = self.done = False
        self._done_at = NEVER
        self._logs = logs
        self._sizes: list[int] = []
        self._output_at = self._looked_at = time.monotonic()

    def take_exits(self) -> None:
        """As for all jobs; when the deciding ranks are done, the others are stopped."""
        super().take_exits()
        ended_well = {rank for rank, ended in self.exits.items() if ended.code == 0}
        if not self.done and self.policy.deciding <= ended_well:
            self.done, self._done_at = True, time.monotonic()
        if self.done and not self.stopped:
            leave = self.policy.leaving & set(self.alive.values())
            self.stop_at = self._done_at + (self.policy.grace_s if leave else LINGER_S)

    def stops_others_after_s(self, rank: int, ended: Exit) -> float:
        if ended.code == 0:
            return NEVER
        return LINGER_S if self.policy.is_victim(rank) else self.policy.evidence_s

    def pass_on(self, signals: Signals) -> None:
        for number in (*signals.received(), *self.server.messages()):
            self._signal(number)
            self.passed_on.add(number)

    def ask_to_stop(self, signals: Signals) -> None:
        """Start the grace period. A signal of this process was passed on, and is not repeated."""
        if not signals.reason:
            self._signal(signal.SIGTERM)
        self._kill_after(self.policy.grace_s)

    def look_for_a_hang(self) -> None:
        """After `silence_s` without output, end all by SIGABRT, so that Python writes its stacks.

        Time in which this machine was suspended does not count.
        """
        now = time.monotonic()
        if not self.policy.silence_s or self.stopped or now < self._looked_at + LOOK_EVERY_S:
            return
        sizes = [_size(log) for log in self._logs]
        if sizes != self._sizes or now - self._looked_at > LOOK_EVERY_S + SUSPENDED_S:
            self._sizes, self._output_at = sizes, now
        self._looked_at = now
        if now - self._output_at > self.policy.silence_s:
            self.silent = True
            self._signal(signal.SIGABRT)
            self._kill_after(STACKS_S)


def _size(log: Path) -> int:
    try:
        return os.stat(log).st_size
    except OSError:  # a shared folder may be unavailable for a moment
        return -1


# --- connections ---------------------------------------------------------------------------------
# Whether the ranks of a script were ever connected to each other, read from `/proc`.
#
# A script that makes no process group (`Accelerator()` on a CPU, without `cpu=True`; `fit` of Keras
# without a strategy of several workers) trains N independent copies, and ends well without any
# message. A process group holds TCP sockets as long as it lives: those of torch's store, of Gloo
# and of NCCL, of the gRPC servers of TensorFlow and JAX. So the processes of the ranks are searched
# for such a socket from time to time, until one is found. Scripts of MPI get no note.


EVERY_S = 0.2
LEAST_LOOKS = 10  # with a framework loaded; scripts that end sooner get no note
FRAMEWORKS = ("libtorch_cpu.so", "libtensorflow", "jaxlib")
OTHERS = ("libmpi", "mpi4py", "libmxnet")


@dataclass
class Connections:
    """The sockets of the ranks of one attempt, all of them on this machine."""

    has_met: bool = False
    looks: int = 0  # at ranks that had a framework, none of which had a socket
    _next: float = 0.0
    _loaded: set[int] = field(default_factory=set)

    def look(self, pids: Iterable[int], ranks: int) -> None:
        """Search for sockets if it is time; `pids` are the living ranks."""
        now = time.monotonic()
        if self.has_met or now < self._next:
            return
        self._next = now + EVERY_S
        alive = [pid for pid in pids if pid]
        family = [process for pid in alive for process in (pid, *_descendants(pid))]
        self.has_met = any(map(_has_tcp_socket, family)) or self._may_use_others(alive)
        self.looks += len(self._loaded) == ranks == len(alive)

    def _may_use_others(self, pids: list[int]) -> bool:
        """Note which ranks have loaded a framework. Whether one may be connected otherwise."""
        for pid in pids:
            maps = _text(Path(f"/proc/{pid}/maps"))
            if any(name in maps for name in OTHERS):
                return True
            if any(name in maps for name in FRAMEWORKS):
                self._loaded.add(pid)
        return False

    def note(self, ranks: int) -> str:
        """The note for the end of the job; "" if it is not certain that no rank was connected."""
        if self.has_met or ranks < 2 or self.looks < LEAST_LOOKS:
            return ""
        return (
            f"note: no rank was ever seen connected to another: the {ranks} of them may have "
            "trained apart, each a copy of its own. A script has to make a process group: "
            "Accelerator(cpu=True) on a processor, init_process_group, or a launcher's strategy; "
            "for `fit` of Keras, write a task: docs/tensorflow.md"
        )


def _descendants(pid: int) -> list[int]:
    descendants: list[int] = []
    with suppress(OSError):  # it may end while its folder is read
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, _text(task).split()):
                descendants += [child, *_descendants(child)]
    return descendants


def _has_tcp_socket(pid: int) -> bool:
    """Whether it has one in its own network namespace, where psutil would look in ours."""
    sockets = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = str(file.readlink())
                if name.startswith("socket:["):
                    sockets.add(name[len("socket:[") : -1])
    if not sockets:
        return False
    rows = [_text(Path(f"/proc/{pid}/net/{table}")).splitlines()[1:] for table in ("tcp", "tcp6")]
    return any(row.split()[9] in sockets for table in rows for row in table)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
