"""The stacks of running ranks, written by themselves at a signal, from wherever they stand.

In Python, in a kernel, or stopped: `faulthandler` writes them to a file that the launcher gave.
"""

from __future__ import annotations

import os
import signal
import time

from allranks.launcher.processes.fork_server import STACKS_SIGNAL

STACKS_WAIT_S = 3.0  # a machine that is busy with others takes its time


def stacks_of(pids: dict[int, int], files: dict[int, int]) -> dict[int, str]:
    """What each rank writes of where it stands, within `STACKS_WAIT_S`."""
    for pid in pids.values():
        for number in (STACKS_SIGNAL, signal.SIGCONT):  # a stopped one takes it as it wakes
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
    deadline, sizes = time.monotonic() + STACKS_WAIT_S, dict.fromkeys(pids, -1)
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {rank: os.fstat(files[rank]).st_size for rank in pids}
        if now == sizes and all(now.values()):
            break
        sizes = now
    return {
        rank: os.pread(files[rank], 1 << 20, 0).decode(errors="replace").strip() for rank in pids
    }
