"""A process of `collectives.py` that copies memory: the machine's limit. Standard library only.

python collectives_copy.py ADDRESS RANK
"""

from __future__ import annotations

import ctypes
import sys
import time

from turns import answer_asked


def copies_us(nbytes: int, copies: int) -> list[float]:
    """Microseconds of each of `copies` copies of `nbytes`, between two places that were touched."""
    source, target = (ctypes.create_string_buffer(b"\1" * nbytes, nbytes) for _ in range(2))
    times = []
    for _ in range(copies):
        start = time.perf_counter_ns()
        ctypes.memmove(target, source, nbytes)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


if __name__ == "__main__":
    answer_asked(sys.argv[1], int(sys.argv[2]), copies_us)
