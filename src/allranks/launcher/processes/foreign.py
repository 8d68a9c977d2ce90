"""What Python, torch, Gloo, NCCL, gRPC and TensorFlow say of a failure, and the kind of it.

Their sentences are matched here and nowhere else: everybody else asks for the kind.
"""

from __future__ import annotations

import re

from allranks.errors import AllranksError, FaultKind

_SAID = {
    FaultKind.OUT_OF_MEMORY: re.compile(
        r"MemoryError|OutOfMemoryError|[cC]an't allocate memory|[cC]annot allocate memory"
        r"|CUDA out of memory|RESOURCE_EXHAUSTED: Out of memory|std::bad_alloc"
    ),
    # torch, of a process that reads data: who killed it is not said
    FaultKind.CHILD_KILLED: re.compile(r"by signal: Killed"),
    FaultKind.COLLECTIVE_MISMATCH: re.compile(r"collective mismatch|doesn't match expected size"),
    FaultKind.TWO_TYPES: re.compile(
        r"(?=.*\bfloat\b)(?=.*\bdouble\b).*(?:type|found)", re.IGNORECASE | re.DOTALL
    ),
    FaultKind.NOT_DETERMINISTIC: re.compile(
        r"does not have a deterministic implementation|Deterministic behavior was enabled with"
    ),
    FaultKind.TIMED_OUT: re.compile(r"[tT]imed out"),
    FaultKind.PEER_LOST: re.compile(
        # sockets, and what torch's store and Gloo say of them
        r"connection (?:was )?(?:likely )?(?:closed|reset|refused|aborted)"
        r"|broken pipe|socket closed"
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
    """Whether words that are not ours tell of a failure of this kind."""
    return _SAID[kind].search(text) is not None


def is_of_transport(text: str) -> bool:
    """Whether a collective lost a peer, whoever called it: a program's own sockets say it too."""
    is_collective = any(transport in text for transport in _TRANSPORTS)
    return is_collective and is_said(FaultKind.PEER_LOST, text)


def words_of(error: BaseException) -> str:
    """The text of an error; of one whose text cannot be made, why."""
    try:
        return str(error)
    except Exception as other:
        return f"(no text: its __str__ raises {type(other).__name__})"


def classify(error: BaseException) -> FaultKind:
    """The kind of a failure: an error of ours has one, of another its words tell."""
    if isinstance(error, AllranksError) and error.fault_kind != FaultKind.PROGRAM:
        return error.fault_kind
    return kind_said_in(f"{type(error).__name__}: {words_of(error)}")


def kind_said_in(text: str) -> FaultKind:
    """What ended a process, by its own words; a peer that it lost is told by its collective."""
    kinds = (FaultKind.OUT_OF_MEMORY, FaultKind.CHILD_KILLED)
    return next((kind for kind in kinds if is_said(kind, text)), FaultKind.PROGRAM)
