"""The supervisor of scripts: starts, watches and stops processes that do not use allranks.

Scripts have no heartbeat: signals to the job are forwarded unchanged, and scripts get time to
leave; output is their sign of life. The first failure stops all. Parameter servers do not decide
the end of a job: it is done when the ranks that they serve are.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from allranks.launcher.processes.process import Exit, Process, Processes
from allranks.launcher.signals import Signals
from allranks.launcher.supervisor import EVIDENCE_S, GRACE_S, NEVER, SUSPENDED_S, TICK_S, reap

ASK_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MESSAGES = (signal.SIGUSR1, signal.SIGUSR2)
LINGER_S = 2.0
STACKS_S = 3.0
LOOK_EVERY_S = 0.5


class ForwardedSignals(Signals):
    """Signals to the job that are forwarded to its scripts, each once.

    SIGUSR1 and SIGUSR2 are messages, and end no script. A second SIGINT kills all.
    """

    def __init__(self) -> None:
        self._received: deque[int] = deque()

    def _note(self, number: int, frame: object) -> None:
        self._received.append(number)
        self.insists |= number == signal.SIGINT and self.reason != ""
        if number in ASK_TO_STOP:
            self.reason = self.reason or signal.Signals(number).name

    def received(self) -> list[int]:
        """Signals received since the last call."""
        signals = []
        while self._received:
            signals.append(self._received.popleft())
        return signals


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
    with _ScriptWatch(server, policy) as watch:
        for process in processes:
            watch.start(process)
        while watch.alive:
            watch.take_exits()
            on_tick()
            watch.forward(forwarded)
            watch.check_time_limit()
            watch.check_silence()
            watch.stop_if_due()
    return watch.ended()


@dataclass
class _ScriptWatch:
    server: Processes
    policy: StopPolicy
    alive: dict[int, int] = field(default_factory=dict)  # ticket -> rank
    exits: dict[int, Exit] = field(default_factory=dict)
    stopped: frozenset[int] = frozenset()
    reason: str = ""
    passed_on: set[int] = field(default_factory=set)
    silent: bool = False
    done: bool = False
    done_at: float = NEVER
    term_at: float = NEVER
    kill_at: float = NEVER

    def __post_init__(self) -> None:
        self._logs: list[Path] = []
        self._sizes: list[int] = []
        self._output_at = self._looked_at = time.monotonic()

    def start(self, process: Process) -> None:
        self.alive[self.server.spawn(process)] = process.rank
        self._logs.append(process.log)

    def take_exits(self) -> None:
        """Wait briefly for exits. After a fault the others are stopped soon."""
        exits = self.server.exits(TICK_S)
        if not exits:
            self.server.wake()
        now = time.monotonic()
        for ended in exits:
            if ended.ticket not in self.alive:
                continue
            rank = self.alive.pop(ended.ticket)
            self.exits[rank] = ended
            if ended.code != 0 and not (self.reason or self.silent):
                victim = self.policy.is_victim(rank)
                evidence_s = LINGER_S if victim else self.policy.evidence_s
                self.term_at = min(self.term_at, now + evidence_s)
        codes = {rank: ended.code for rank, ended in self.exits.items()}
        if not self.done and all(codes.get(rank) == 0 for rank in self.policy.deciding):
            self.done, self.done_at = True, now
        if self.done and not self.stopped:
            leave = self.policy.leaving & set(self.alive.values())
            self.term_at = self.done_at + (self.policy.grace_s if leave else LINGER_S)

    def forward(self, forwarded: ForwardedSignals) -> None:
        """Forward received signals; those that ask to stop start the grace period."""
        for number in forwarded.received():
            self._signal(number)
            self.passed_on.add(number)
            if number in ASK_TO_STOP:
                self._ask(signal.Signals(number).name)
        for number in self.server.messages():
            self._signal(number)
            self.passed_on.add(number)
        elsewhere = self.server.stop_reason()
        if elsewhere and not self.reason:
            self._signal(signal.SIGTERM)
            self._ask(elsewhere)
        if forwarded.insists:
            self.kill_at = 0.0

    def check_time_limit(self) -> None:
        if time.monotonic() >= self.policy.stop_at and not self.reason:
            self._signal(signal.SIGTERM)
            self._ask("time limit")

    def _ask(self, reason: str) -> None:
        """Start the grace period, in which processes get no further SIGTERM."""
        if not self.reason:
            self.reason = reason
            self.stopped = frozenset(self.alive.values())
            self.term_at, self.kill_at = NEVER, time.monotonic() + self.policy.grace_s

    def check_silence(self) -> None:
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
            self.stopped = frozenset(self.alive.values())
            self._signal(signal.SIGABRT)
            self.term_at, self.kill_at = NEVER, now + STACKS_S

    def stop_if_due(self) -> None:
        now = time.monotonic()
        if now >= self.term_at:
            self.stopped = self.stopped or frozenset(self.alive.values())
            self._signal(signal.SIGTERM)
            self.term_at, self.kill_at = NEVER, min(self.kill_at, now + GRACE_S)
        if now >= self.kill_at:
            self.stopped = self.stopped or frozenset(self.alive.values())
            self._signal(signal.SIGKILL)
            self.kill_at = now + GRACE_S

    def _signal(self, number: int) -> None:
        """Send a signal to all; continue halted processes first, unless it is only a message."""
        for ticket in self.alive:
            self.server.signal(ticket, number)
            if number not in MESSAGES:
                self.server.signal(ticket, signal.SIGCONT)

    def ended(self) -> ScriptsEnded:
        return ScriptsEnded(
            self.exits,
            self.stopped,
            self.reason,
            frozenset(self.passed_on),
            self.silent,
            self.done,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        reap(self.server, self.alive, kill=error is not None)


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
