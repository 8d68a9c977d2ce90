"""What is said of processes between whoever wants them and whoever owns them. Plain data.

The supervisor decides; a `Processes` owns: a fork server on this machine (`server.ForkServer`), or
an agent on every node (`nodes.Nodes`). The supervisor does not know which.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from allranks.launcher.heartbeat import HeartbeatTable


@dataclass(frozen=True)
class Process:
    """One process to start: its rank, what it calls, what is added to its environment, its log.

    `defaults` are added to it where they are not set on its node.

    `target` is module:function, called with `argument`. With `hosts_store` it is given the socket
    that its node listens on, where the ranks of all nodes meet. `name` is how a person knows it.
    """

    rank: int
    target: str
    argument: Any
    environment: dict[str, str]
    log: Path
    hosts_store: bool = False
    name: str = ""
    defaults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code` < 0 is minus the signal; `monotonic` is this host's clock.

    `peak_bytes` is the most memory that it, or a process that it waited for, held at once. `lost`
    says what became of its node, if that is why nothing more is known. On another node, its clock
    is ahead of ours by `clock_ahead_s`,
    and `memory` is what its kernel says of processes it killed.
    """

    ticket: int
    code: int
    monotonic: float
    peak_bytes: int = 0
    host: str = field(default_factory=socket.gethostname)
    lost: str = ""
    clock_ahead_s: float = 0.0
    memory: str | None = None


@dataclass(frozen=True)
class Stand:
    """Where a living process stands: the kernel's letter for its state, and its stacks."""

    state: str
    stacks: str


class Processes(Protocol):
    """Who owns processes, on one node or on several. A ticket stands for a process."""

    hash_seed: str
    """`PYTHONHASHSEED` of all of them."""

    def spawn(self, process: Process, heartbeats: HeartbeatTable | None = None) -> int:
        """Start a process; with `heartbeats` it beats in them, and can be asked where it stands."""
        ...

    def exits(self, timeout_s: float) -> list[Exit]:
        """The processes that ended, in order; waits up to `timeout_s` for the first."""
        ...

    def signal(self, ticket: int, number: int) -> None:
        """Send a signal to a process and all of its group; one that has ended is left alone."""
        ...

    def started(self, ticket: int) -> bool:
        """Whether the process is known to have started, and not to have ended."""
        ...

    def stands(self, tickets: Mapping[int, int]) -> dict[int, Stand]:
        """Where the processes of these tickets stand (rank -> ticket); takes a second or so."""
        ...

    def wake(self) -> None:
        """Let those that own processes go on if somebody has stopped them."""
        ...

    def is_silent(self) -> bool:
        """Whether some node has not been heard of for a while, and may be lost."""
        ...

    def messages(self) -> list[int]:
        """Signals that other nodes got and that ask for no end, for scripts that know them."""
        ...

    def asked(self) -> str:
        """Why somebody wants the job to stop who said so on another node; "" if nobody does."""
        ...
