"""What a process said last, read from its log: the cause of its end, or the loss of a peer.

A script that is run unchanged leaves nothing but its output and its exit code. Of the output the
last traceback is taken, or the last lines; whoever speaks of a connection that broke is a victim.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 1 << 17
MOST_LINES = 60
FEW_LINES = 12
TRACEBACK = "Traceback (most recent call last):"
NO_FRAME = "<no Python frame>"
EXTENSIONS = "Extension modules: "  # which faulthandler adds
CURRENT = "Current thread 0x"
FATAL = ("Fatal Python error:", CURRENT, "Thread 0x")
OUT_OF_MEMORY = (
    "MemoryError",
    "OutOfMemoryError",
    "can't allocate memory",
    "annot allocate memory",
    "CUDA out of memory",
    "RESOURCE_EXHAUSTED: Out of memory",
    "std::bad_alloc",
)
LOST_A_PEER = re.compile(
    # sockets, and what torch's store and Gloo say of them
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|socket closed"
    r"|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|DistNetworkError|DistStoreError"
    r"|recvValue failed|failed to recv|pair closure|timed out waiting .{0,40}for (?:recv|send)"
    r"|timed out after .{0,60}waiting for clients|wait timeout after"
    # NCCL
    r"|remote process exited|ncclRemoteError|NCCL communicator was aborted|watchdog caught"
    # gRPC, TensorFlow and JAX
    r"|failed to connect to all addresses|stopped sending heartbeats|UNAVAILABLE:|UnavailableError"
    r"|collective ops is aborted|another task died|the coordination service|coordination service agent"
    r"|peer .{0,40}(?:closed|gone|lost|exited)|CANCELLED:",
    re.IGNORECASE,
)
_RANK = re.compile(r"^\[(?:rank)?\d+\]:\s?")  # torch puts it before each line of a traceback
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")


@dataclass(frozen=True)
class LastWords:
    """`text` is the last traceback, or what was printed last; `error` is the line that says why.

    `is_victim`: it lost the connection to another process.
    """

    text: str
    error: str
    is_victim: bool
    is_out_of_memory: bool


def is_out_of_memory(said: str) -> bool:
    """Whether words of Python, CUDA, XLA or C++ say that there was no memory left."""
    return any(sign in said for sign in OUT_OF_MEMORY)


def stacks_in(log: Path, start: int = 0) -> str:
    """The stacks that a fatal signal left, all of them, that of the running thread first."""
    lines = _lines(log, start)
    first = next((i for i, line in enumerate(lines) if line.startswith(FATAL)), len(lines))
    return "\n".join(_current_first(lines[first:]))


def last_words(log: Path, start: int = 0) -> LastWords:
    """What was written into `log` from byte `start` on, in its last words."""
    lines = _lines(log, start)
    found = _last_traceback(lines) or lines[-FEW_LINES:]
    error = _thrown(lines) if found[:1] and found[0].startswith(FATAL) else ""
    error = error or _error_of(found)
    said = "\n".join(lines[-MOST_LINES:]) if not _is_traceback(found) else "\n".join(found)
    return LastWords(
        "\n".join(found),
        error,
        LOST_A_PEER.search(error if _is_traceback(found) and error else said) is not None,
        is_out_of_memory(said),
    )


def _lines(log: Path, start: int) -> list[str]:
    """The last lines that are not empty, without the marks of torch and of progress bars."""
    lines = [_RANK.sub("", line) for line in _tail(log, start).splitlines()]
    lines = [line.rpartition("\r")[2].rstrip() for line in lines]
    return [line for line in lines if line and not line.startswith(EXTENSIONS)]


def _tail(log: Path, start: int) -> str:
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - MOST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _is_traceback(lines: list[str]) -> bool:
    return bool(lines) and lines[0].lstrip().startswith((TRACEBACK, *FATAL))


def _last_traceback(lines: list[str]) -> list[str]:
    """The last traceback of Python, or the stacks that a fatal signal left, if any.

    One that died of a signal when it was being taken apart had said before why it left.
    """
    fatal = next((i for i, line in enumerate(lines) if line.startswith(FATAL)), len(lines))
    stacks, before = _current_first(lines[fatal:])[:MOST_LINES], lines[:fatal]
    if not any(NO_FRAME in line for line in stacks):
        return stacks or _python_traceback(before)
    return _python_traceback(before) or stacks


def _current_first(lines: list[str]) -> list[str]:
    """The stacks of all threads, that of the one which was running before the others."""
    start = next((i for i, line in enumerate(lines) if line.startswith(CURRENT)), None)
    if start is None:
        return lines
    end = start + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    head = 1 if lines[0].startswith(FATAL[0]) else 0
    return lines[:head] + lines[start:end] + lines[head:start] + lines[end:]


def _python_traceback(lines: list[str]) -> list[str]:
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(TRACEBACK)]
    if not starts:
        return []
    first, end = starts[-1], starts[-1] + 1
    while end < len(lines) and (lines[end].startswith(" ") or not _ERROR.match(lines[end])):
        end += 1
    return lines[first : end + 1][:1] + lines[max(first + 1, end + 1 - MOST_LINES) : end + 1]


def _thrown(lines: list[str]) -> str:
    """What an exception of C++ said that nobody caught, before the stacks; "" if there was none."""
    found = [line.partition("what():")[2].strip() for line in lines if "what():" in line]
    return found[-1] if found else ""


def _error_of(lines: list[str]) -> str:
    """The line that names the error: the last one that is not part of a stack."""
    if lines and lines[0].startswith(FATAL[0]):
        return lines[0]
    return next((line for line in reversed(lines) if not line.startswith(" ")), "")
