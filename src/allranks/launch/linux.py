"""Two calls of Linux that Python does not wrap: die with your parent, adopt your grandchildren."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies. Not inherited: each process asks."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parents die become children of this process, so that it can end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children_of_this_process() -> list[int]:
    """The process ids of all children, adopted ones too."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]
