"""What is said of processes between whoever wants them and whoever owns them. Plain data.

The supervisor decides; a `Processes` owns: a fork server on this machine (`server.ForkServer`), or
an agent on every node (`nodes.Nodes`). The supervisor does not know which.
"""

from __future__ import annotations

import re
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError, FaultKind, PeerLost, RequestError
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
class ProcessState:
    """Where a living process stands: the kernel's letter for its state, and its stacks."""

    state: str
    stacks: str


class Processes(ABC):
    """Who owns processes, on one node or on several. A ticket stands for a process."""

    hash_seed: str
    """`PYTHONHASHSEED` of all of them."""

    @abstractmethod
    def spawn(self, process: Process, heartbeats: HeartbeatTable | None = None) -> int:
        """Start a process; with `heartbeats` it beats in them, and can be asked where it stands."""

    @abstractmethod
    def exits(self, timeout_s: float) -> list[Exit]:
        """The processes that ended, in order; waits up to `timeout_s` for the first."""

    @abstractmethod
    def signal(self, ticket: int, number: int) -> None:
        """Send a signal to a process and all of its group; one that has ended is left alone."""

    @abstractmethod
    def started(self, ticket: int) -> bool:
        """Whether the process is known to have started, and not to have ended."""

    def dying(self) -> set[int]:
        """The tickets of processes that end with a bad code, before their exit is told."""
        return set()

    @abstractmethod
    def stands(self, tickets: Mapping[int, int]) -> dict[int, ProcessState]:
        """Where the processes of these tickets stand (rank -> ticket); takes a second or so."""

    def wake(self) -> None:
        """Continue the servers that own processes, if they were suspended; agents do it alone."""

    def is_silent(self) -> bool:
        """Whether some node has not been heard of for a while, and may be lost."""
        return False

    def messages(self) -> list[int]:
        """Signals that other nodes got and that ask for no end, for scripts that know them."""
        return []

    def stop_reason(self) -> str:
        """Why the job is to stop, by a signal on another node; "" if it is not."""
        return ""


# --- foreign -------------------------------------------------------------------------------------
# Messages of Python, torch, Gloo, NCCL, gRPC and TensorFlow, and the kind of failure they mean.
#
# Messages are matched only here: other modules use the kind.


_SAID = {
    FaultKind.OUT_OF_MEMORY: re.compile(
        r"MemoryError|OutOfMemoryError|[cC]an't allocate memory|[cC]annot allocate memory"
        r"|CUDA out of memory|RESOURCE_EXHAUSTED: Out of memory|std::bad_alloc"
    ),
    # torch's message for a data loader process; it does not name the killer
    FaultKind.CHILD_KILLED: re.compile(r"by signal: Killed"),
    FaultKind.COLLECTIVE_MISMATCH: re.compile(r"collective mismatch|doesn't match expected size"),
    FaultKind.TWO_TYPES: re.compile(
        r"(?=.*\bfloat\b)(?=.*\bdouble\b).*(?:type|found)", re.IGNORECASE | re.DOTALL
    ),
    FaultKind.NOT_DETERMINISTIC: re.compile(
        r"does not have a deterministic implementation|Deterministic behavior was enabled with"
    ),
    FaultKind.TIMED_OUT: re.compile(r"(?<!Connection )[tT]imed out"),  # that one is the kernel's
    FaultKind.PEER_LOST: re.compile(
        # sockets, and what torch's store and Gloo say of them
        r"connection (?:was )?(?:likely )?(?:closed|reset|refused|aborted|timed out)"
        r"|broken pipe|socket (?:unexpectedly )?closed|software caused connection abort"
        r"|no route to host|(?:network|host) is (?:down|unreachable)"
        r"|(?:connect|read|write) (?:error|timeout) \["  # Gloo, before an address
        r"|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|DistNetworkError|DistStoreError"
        r"|recvValue failed|failed to recv|pair closure|timed out waiting .{0,40}for (?:recv|send)"
        r"|timed out after .{0,60}waiting for clients|wait timeout after|timeout waiting for key"
        # NCCL
        r"|remote process exited|ncclRemoteError|communicator (?:\w+ )?was aborted"
        r"|watchdog caught|before timing out"
        # gRPC, TensorFlow and JAX
        r"|failed to connect to all addresses|stopped sending heartbeats|UNAVAILABLE:"
        r"|UnavailableError|collective ops is aborted|another task died|the coordination service"
        r"|coordination service agent|peer .{0,40}(?:closed|gone|lost|exited)|CANCELLED:",
        re.IGNORECASE,
    ),
}
_TRANSPORTS = ("gloo/transport", "shared memory: peer lost")


def is_said(kind: FaultKind, text: str) -> bool:
    """Whether another library's message means a failure of this kind."""
    return _SAID[kind].search(text) is not None


def is_of_transport(text: str) -> bool:
    """Whether a collective lost a peer; a program's own sockets may have similar messages."""
    is_collective = any(transport in text for transport in _TRANSPORTS)
    return is_collective and is_said(FaultKind.PEER_LOST, text)


def words_of(error: BaseException) -> str:
    """The text of an error; of one whose text cannot be made, why."""
    try:
        return str(error)
    except Exception as other:
        return f"(no text: its __str__ raises {type(other).__name__})"


def classify(error: BaseException) -> FaultKind:
    """The kind of a failure: that of an error of ours, or by the message of another."""
    if isinstance(error, AllranksError) and error.fault_kind != FaultKind.PROGRAM:
        return error.fault_kind
    return kind_said_in(f"{type(error).__name__}: {words_of(error)}")


def kind_said_in(text: str) -> FaultKind:
    """The kind of fault in a message; a lost peer is recognised by its collective instead."""
    kinds = (FaultKind.OUT_OF_MEMORY, FaultKind.CHILD_KILLED)
    return next((kind for kind in kinds if is_said(kind, text)), FaultKind.PROGRAM)


# --- failure -------------------------------------------------------------------------------------
# The record of a rank's failure, from which the supervisor finds the first one and its cause.


LONGEST_MESSAGE, LONGEST_STACK = 4_000, 32_000  # characters; it is written, told and shown
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Keras paints its errors


def failure_of(error: BaseException, updates: int, step: int | None) -> dict[str, Any]:
    """The values of the event `failed`, after so many own updates, in `step` of the job."""
    of_ours, message = error if isinstance(error, AllranksError) else None, words_of(error)
    stack = "" if of_ours and of_ours.says_all else "".join(traceback.format_exception(error))
    return {
        "kind": type(error).__name__,
        "fault_kind": classify(error),
        "message": COLOURS.sub("", shortened(message, LONGEST_MESSAGE)),
        "traceback": COLOURS.sub("", shortened(stack, LONGEST_STACK)),
        "peer_lost": isinstance(error, PeerLost) or is_of_transport(message),
        "passing": of_ours.passing if of_ours else True,
        "request": error.to_data() if isinstance(error, RequestError) else None,
        "updates": updates,
        "step": step,
    }


def shortened(text: str, most: int) -> str:
    """The text, or its begin and its end where it has more characters than `most`."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def exit_code_of(error: BaseException) -> int:
    """The exit code of a rank that ends with `error`."""
    return error.exit_code if isinstance(error, AllranksError) else 1
