"""The end of a process, as another one hears it: at once, and after all that it has sent.

    python tests/shared_memory/heard_ends.py

The last line says how the messages came that a rank sent before it left and ended, or just ended;
and the least number of seconds in which a rank that waits heard that another one was killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from forked_ranks import World, ended, forked, library

BYTES = 200_000  # more than is taken of a message at a time, and less than its channel holds
MERGES = b"\0\1"
ROUNDS = 20  # of which one at least is not disturbed
BEGUN_S, COMPUTES_S, PATIENCE_S = 0.01, 0.3, 5.0


def message(*, leaves: bool) -> bool:
    """Whether a receive that nobody waits for meanwhile has all that was sent."""
    world = World(2, [(0, 1)], library())
    there = (ctypes.c_char * BYTES).from_address(world.shared(BYTES))

    def act(its: World) -> None:
        group = its.group(0, MERGES, True)
        if its.rank == 0:
            sent = (ctypes.c_char * BYTES).from_buffer(bytearray(b"\7" * BYTES))
            group.send(ctypes.addressof(sent), BYTES, 1, 5).wait(PATIENCE_S)
            if leaves:
                group.leave()
            return
        received = group.receive(ctypes.addressof(there), BYTES, 0, 5)
        time.sleep(COMPUTES_S)  # the helper drives
        assert received.wait(PATIENCE_S)

    codes = ended(forked(world, act))
    return codes == [0, 0] and bytes(there) == b"\7" * BYTES


def killed() -> float:
    """The seconds from a kill to the error of a rank that had begun to wait just before."""
    world = World(2, [(0, 1)], library())
    address = world.shared(4096)
    waits, killed, heard = ((ctypes.c_double * 3).from_address(address) for _ in range(3))

    def act(its: World) -> None:
        group = its.group(0, MERGES, True)
        if its.rank == 0:
            latest = time.monotonic() + PATIENCE_S
            while not waits[0] and time.monotonic() < latest:
                time.sleep(0.001)
            time.sleep(BEGUN_S)
            killed[1] = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)
        waits[0] = 1.0
        try:
            group.barrier().wait(PATIENCE_S)
        except its.core.PeerLost:
            heard[2] = time.monotonic()

    assert ended(forked(world, act)) == [-signal.SIGKILL, 0]
    return heard[2] - killed[1]


def main() -> int:
    found: dict[str, Any] = {"whole": {}}
    for leaves in (True, False):
        name = "left, and ended" if leaves else "just ended"
        found["whole"][name] = all(message(leaves=leaves) for _ in range(2))
    found["heard_after_s"] = min(killed() for _ in range(ROUNDS))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
